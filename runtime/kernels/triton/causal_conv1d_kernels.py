"""Kernels of the causal depthwise convolution with SiLU. A program walks a segment of time for a block of channels and keeps the
last W - 1 rows in registers, so every row is loaded once per segment.

`full` is the tail followed by x: output t reads full[t … t+W-1]. Bytes moved: those of x and y (VJP: x, dy, dx) once, W - 1 rows
per segment again (VJP: twice), and in the VJP one row of partial sums per tap and segment: with 64 steps a segment and W = 4 at
most 1.05 (VJP 1.18) times the minimum in bfloat16.

Legend: b batch, t time, f time in `full`, d channels, w taps, s segments.
"""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import load_rows, row, silu, silu_slope, slot


@triton.jit
def full_row(x, tail, batch, f, d, x_b, x_t, T, D, WIDTH: tl.constexpr):
    """full[f] in float32: x for f >= W - 1, the tail (zeros when None) before, zero outside."""
    t = tl.where(d < D, f - (WIDTH - 1), T)
    found = tl.load(row(x, batch, f - (WIDTH - 1), x_b, x_t) + d, mask=(t >= 0) & (t < T), other=0.0).to(tl.float32)
    if tail is not None:
        early = (t < 0) & (t > -WIDTH)
        found += tl.load(slot(tail, batch, f, WIDTH - 1, D) + d, mask=early, other=0.0).to(tl.float32)
    return found


@triton.jit
def full_rows(x, tail, batch, f, d, x_b, x_t, T, D, WIDTH: tl.constexpr):
    """The W - 1 rows from f on."""
    rows = ()
    for i in tl.static_range(WIDTH - 1):
        rows = rows + (full_row(x, tail, batch, f + i, d, x_b, x_t, T, D, WIDTH),)
    return rows


@triton.jit
def taps(weight, d, D, WIDTH: tl.constexpr):
    """The rows of weight (w, d)."""
    rows = ()
    for w in tl.static_range(WIDTH):
        rows = rows + (tl.load(weight + w * D + d, mask=d < D, other=0.0),)
    return rows


@triton.jit
def shifted(rows, newest, WIDTH: tl.constexpr):
    """The last W - 1 rows after one more."""
    moved = ()
    for i in tl.static_range(1, WIDTH - 1):
        moved = moved + (rows[i],)
    if WIDTH > 1:
        moved = moved + (newest,)
    return moved


@triton.jit
def weighted(rows, newest, weights, out, WIDTH: tl.constexpr):
    """out + Σ_w rows[w] weights[w], the newest row last."""
    for w in tl.static_range(WIDTH - 1):
        out += rows[w] * weights[w]
    return out + newest * weights[WIDTH - 1]


@triton.jit
def causal_conv1d(
    x, weight, bias, tail, y, last, x_b, x_t, T, D, segment, count, WIDTH: tl.constexpr, SILU: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y (b, t, d) and last (b, w - 1, d); weight (w, d), bias (d) in float32, tail (b, w - 1, d) or None."""
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = s * segment
    stop = tl.minimum(start + segment, T)
    weights = taps(weight, d, D, WIDTH)
    shift = tl.zeros((BLOCK_D,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + d, mask=d < D, other=0.0)
    rows = full_rows(x, tail, batch, start, d, x_b, x_t, T, D, WIDTH)
    for t in range(start, stop, UNROLL):
        limit = tl.where(d < D, stop - t, 0)
        news = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, UNROLL)
        for i in tl.static_range(UNROLL):
            out = weighted(rows, news[i], weights, shift, WIDTH)
            rows = shifted(rows, news[i], WIDTH)
            if SILU:
                out = silu(out)
            tl.store(slot(y, batch, t + i, T, D) + d, out.to(y.dtype.element_ty), mask=i < limit)
    if s == count - 1:
        for i in tl.static_range(WIDTH - 1):
            late = full_row(x, tail, batch, T + i, d, x_b, x_t, T, D, WIDTH)
            tl.store(slot(last, batch, i, WIDTH - 1, D) + d, late, mask=d < D)


@triton.jit
def causal_conv1d_vjp(
    dy, dlast, x, weight, bias, tail, dx, dtail, dweight, dbias, dy_b, dy_t, x_b, x_t, T, D, segment, count,
    WIDTH: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx (b, t, d), dtail (b, w - 1, d), and sums per segment: dweight (b, s, w, d), dbias (b, s, d); any may be None.

    Segments lie in `full`: dfull[f] = Σ_w dout[f - w] weight[w], with dout = dy silu'(output before the activation); a segment
    first goes over the W - 1 outputs before it, whose dout its first rows need. It must have at least W - 1 steps.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = s * segment
    stop = tl.minimum(first + segment, T + WIDTH - 1)
    start = tl.maximum(first - (WIDTH - 1), 0)
    weights = taps(weight, d, D, WIDTH)
    shift = tl.zeros((BLOCK_D,), tl.float32)
    dshift = shift
    if bias is not None:
        shift += tl.load(bias + d, mask=d < D, other=0.0)
    rows = full_rows(x, tail, batch, start, d, x_b, x_t, T, D, WIDTH)
    douts = ()  # dout of the W - 1 steps before
    dweights = (dshift,)
    for _ in tl.static_range(WIDTH - 1):
        douts = douts + (dshift,)
        dweights = dweights + (dshift,)
    for t in range(start, stop, UNROLL):
        limit = tl.where(d < D, T - t, 0)
        news = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, UNROLL)
        dys = load_rows(row(dy, batch, t, dy_b, dy_t), dy_t, d, limit, 0.0, UNROLL)
        for i in tl.static_range(UNROLL):
            dout = dys[i]
            if SILU:
                dout *= silu_slope(weighted(rows, news[i], weights, shift, WIDTH))
            own = tl.where((t + i >= first) & (t + i < stop), dout, 0.0)
            dshift += own
            sums = ()
            for w in tl.static_range(WIDTH - 1):
                sums = sums + (dweights[w] + own * rows[w],)
            dweights = sums + (dweights[WIDTH - 1] + own * news[i],)
            dfull = dout * weights[0]
            for w in tl.static_range(1, WIDTH):
                dfull += douts[WIDTH - 1 - w] * weights[w]
            rows = shifted(rows, news[i], WIDTH)
            douts = shifted(douts, dout, WIDTH)
            store_dfull(dfull, dlast, dx, dtail, batch, t + i, tl.where(t + i >= first, stop, 0), d, T, D, WIDTH)
    if dbias is not None:
        tl.store(slot(dbias, batch, s, count, D) + d, dshift, mask=d < D)
    if dweight is not None:
        for w in tl.static_range(WIDTH):
            tl.store(slot(dweight, batch, s, count, WIDTH * D) + w * D + d, dweights[w], mask=d < D)


@triton.jit
def store_dfull(dfull, dlast, dx, dtail, batch, f, stop, d, T, D, WIDTH: tl.constexpr):
    """Write dfull[f] where f < stop: to the tail's cotangent or to that of x; its last rows also are outgoing tail."""
    t = tl.where((d < D) & (f < stop), f - (WIDTH - 1), T)
    if dlast is not None:
        late = (t > T - WIDTH) & (t < T)
        dfull += tl.load(slot(dlast, batch, f - T, WIDTH - 1, D) + d, mask=late, other=0.0).to(tl.float32)
    if dx is not None:
        place = slot(dx, batch, f - (WIDTH - 1), T, D) + d
        tl.store(place, dfull.to(dx.dtype.element_ty), mask=(t >= 0) & (t < T))
    if dtail is not None:
        tl.store(slot(dtail, batch, f, WIDTH - 1, D) + d, dfull, mask=t < 0)
