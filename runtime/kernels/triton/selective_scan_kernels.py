"""Kernels of the selective scan's forward, in three steps over segments of time.

A program holds the states of a block of channels in registers, (n, d) with n inside a thread so that y = C · h needs no exchange
between threads, and walks one segment. `local` gives each segment's sum of step sizes and its end state from zero, `join` walks
the few segments, `outputs` starts each segment from the state that enters it. `adjoint_local` is `local` for the adjoint, run
backwards.

Bytes of `outputs`: x, dt, z, y once, B and C once per block of channels (from L2), states once per 32 steps: for 16 states in
bfloat16 10 where the minimum is 8 per step and channel. Of `local` and `adjoint_local`: their inputs once, and one state per
segment, 1.14 times the minimum with 128 steps per segment. The exponentials, not the bytes, bound them on current GPUs.

Legend: b batch, t time, d channels, n states, s segments, k checkpoints (one before every INTERVAL steps, and the last state).
"""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import load_rows, row, silu, slot, softplus


@triton.jit
def step_sizes(raws, shift, limit, SOFTPLUS: tl.constexpr, U: tl.constexpr):
    """δ of U steps from rows of dt and the row of biases; 0 where i >= limit, so that such a step changes nothing.

    The mask comes after softplus (softplus(0) is not 0) and before any exponential.
    """
    deltas = ()
    for i in tl.static_range(U):
        raw = raws[i] + shift
        if SOFTPLUS:
            raw = softplus(raw)
        deltas = deltas + (tl.where(i < limit, raw, 0.0),)
    return deltas


@triton.jit
def bias_row(bias, d, D, BLOCK_D: tl.constexpr):
    """The row of biases, zeros where there are none."""
    shift = tl.zeros((1, BLOCK_D), tl.float32)
    if bias is not None:
        shift += tl.load(bias + d, mask=d < D, other=0.0)
    return shift


@triton.jit
def selective_scan_local(
    x, dt, A, B, bias, total, end, x_b, x_t, dt_b, dt_t, B_b, B_t, T, D, N, segment, count, SOFTPLUS: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum of δ, total (b, s, d), and local end state, end (b, s, n, d), of the first `count` segments; A: (n, d) in float32."""
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    live = (n < N) & (d < D)
    decays = tl.load(A + n * D + d, mask=live, other=0.0)
    shift = bias_row(bias, d, D, BLOCK_D)
    start = s * segment
    stop = tl.minimum(start + segment, T)
    h = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    elapsed = tl.zeros((1, BLOCK_D), tl.float32)
    for t in range(start, stop, UNROLL):
        limit = tl.where(d < D, stop - t, 0)
        xs = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, UNROLL)
        raws = load_rows(row(dt, batch, t, dt_b, dt_t), dt_t, d, limit, 0.0, UNROLL)
        deltas = step_sizes(raws, shift, limit, SOFTPLUS, UNROLL)
        for i in tl.static_range(UNROLL):
            b = tl.load(row(B, batch, t + i, B_b, B_t) + n, mask=tl.where(n < N, stop - t, 0) > i, other=0.0)
            h = tl.exp(deltas[i] * decays) * h + (deltas[i] * xs[i]) * b.to(tl.float32)
            elapsed += deltas[i]
    tl.store(slot(total, batch, s, count, D) + d, elapsed, mask=d < D)
    tl.store(slot(end, batch, s, count, N * D) + n * D + d, h, mask=live)


@triton.jit
def selective_scan_join(
    total, end, A, first, entry, out, D, N, count, entries, every, REVERSE: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The states between `count` segments, described by total (b, s, d) and end (b, s, n, d).

    The state before segment s (REVERSE: the adjoint after it) goes into slot s * every (REVERSE: s + 1) of entry
    (b, entries, n, d), what leaves the last one (REVERSE: the first) into the slot that remains, and into out (b, d, n).
    `first` (b, d, n) enters; it, entry and out may be None.
    """
    batch = tl.program_id(0)
    n = tl.program_id(2)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    decay = tl.load(A + n * D + d, mask=d < D, other=0.0)
    h = tl.zeros((BLOCK_D,), tl.float32)
    if first is not None:
        h += tl.load(slot(first, batch, 0, 1, N * D) + d * N + n, mask=d < D, other=0.0)
    for k in range(tl.cdiv(count, UNROLL)):
        s = (tl.cdiv(count, UNROLL) - 1 - k if REVERSE else k) * UNROLL
        limit = tl.where(d < D, count - s, 0)
        totals = load_rows(slot(total, batch, s, count, D), D, d, limit, 0.0, UNROLL)
        ends = load_rows(slot(end, batch, s, count, N * D), N * D, n * D + d, limit, 0.0, UNROLL)
        for i in tl.static_range(UNROLL - 1 if REVERSE else 0, -1 if REVERSE else UNROLL, -1 if REVERSE else 1):
            if entry is not None:
                place = (s + i + (1 if REVERSE else 0)) * every
                tl.store(slot(entry, batch, place, entries, N * D) + n * D + d, h, mask=i < limit)
            h = tl.exp(totals[i] * decay) * h + ends[i]
    if entry is not None:
        place = 0 if REVERSE else count * every
        tl.store(slot(entry, batch, place, entries, N * D) + n * D + d, h, mask=d < D)
    if out is not None:
        tl.store(slot(out, batch, 0, 1, N * D) + d * N + n, h, mask=d < D)


@triton.jit
def selective_scan_outputs(
    x, dt, A, B, C, skip, z, bias, states, y, last, x_b, x_t, dt_b, dt_t, B_b, B_t, C_b, C_t, z_b, z_t, T, D, N, segment, count,
    SOFTPLUS: tl.constexpr, INTERVAL: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y (b, t, d), last (b, d, n), and the checkpoints inside segments and at the end, states (b, k, n, d).

    The checkpoint before each segment must be there already.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    live = (n < N) & (d < D)
    decays = tl.load(A + n * D + d, mask=live, other=0.0)
    shift = bias_row(bias, d, D, BLOCK_D)
    through = bias_row(skip, d, D, BLOCK_D)
    start = s * segment
    stop = tl.minimum(start + segment, T)
    checkpoints = tl.cdiv(T, INTERVAL) + 1
    h = tl.load(slot(states, batch, start // INTERVAL, checkpoints, N * D) + n * D + d, mask=live, other=0.0)
    for block in range(start, stop, INTERVAL):
        if block > start:
            tl.store(slot(states, batch, block // INTERVAL, checkpoints, N * D) + n * D + d, h, mask=live)
        for t in range(block, tl.minimum(block + INTERVAL, stop), UNROLL):
            limit = tl.where(d < D, stop - t, 0)
            xs = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, UNROLL)
            raws = load_rows(row(dt, batch, t, dt_b, dt_t), dt_t, d, limit, 0.0, UNROLL)
            if z is not None:
                zs = load_rows(row(z, batch, t, z_b, z_t), z_t, d, limit, 0.0, UNROLL)
            deltas = step_sizes(raws, shift, limit, SOFTPLUS, UNROLL)
            for i in tl.static_range(UNROLL):
                given = tl.where(n < N, stop - t, 0) > i
                b = tl.load(row(B, batch, t + i, B_b, B_t) + n, mask=given, other=0.0).to(tl.float32)
                c = tl.load(row(C, batch, t + i, C_b, C_t) + n, mask=given, other=0.0).to(tl.float32)
                h = tl.exp(deltas[i] * decays) * h + (deltas[i] * xs[i]) * b
                out = tl.sum(h * c, 0)[None, :] + through * xs[i]
                if z is not None:
                    out *= silu(zs[i])
                tl.store(slot(y, batch, t + i, T, D) + d, out.to(y.dtype.element_ty), mask=i < limit)
    if s == count - 1:
        tl.store(slot(states, batch, checkpoints - 1, checkpoints, N * D) + n * D + d, h, mask=live)
        tl.store(slot(last, batch, 0, 1, N * D) + d * N + n, h, mask=live)


@triton.jit
def selective_scan_adjoint_local(
    dy, dt, A, C, z, bias, total, end, dy_b, dy_t, dt_b, dt_t, C_b, C_t, z_b, z_t, T, D, N, segment, count,
    offset, SOFTPLUS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What a segment hands back when nothing enters it at its end, end (b, s, n, d), and its sum of δ, total (b, s, d).

    It does so for `count` segments, the first of which is number `offset`.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    live = (n < N) & (d < D)
    decays = tl.load(A + n * D + d, mask=live, other=0.0)
    shift = bias_row(bias, d, D, BLOCK_D)
    start = (s + offset) * segment
    stop = tl.minimum(start + segment, T)
    mu = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    elapsed = tl.zeros((1, BLOCK_D), tl.float32)
    rounds = tl.cdiv(stop - start, UNROLL)
    for k in range(rounds):
        t = start + (rounds - 1 - k) * UNROLL
        limit = tl.where(d < D, stop - t, 0)
        raws = load_rows(row(dt, batch, t, dt_b, dt_t), dt_t, d, limit, 0.0, UNROLL)
        deltas = step_sizes(raws, shift, limit, SOFTPLUS, UNROLL)
        douts = load_rows(row(dy, batch, t, dy_b, dy_t), dy_t, d, limit, 0.0, UNROLL)
        if z is not None:
            zs = load_rows(row(z, batch, t, z_b, z_t), z_t, d, limit, 0.0, UNROLL)
        for i in tl.static_range(UNROLL - 1, -1, -1):
            c = tl.load(row(C, batch, t + i, C_b, C_t) + n, mask=tl.where(n < N, stop - t, 0) > i, other=0.0)
            dout = douts[i]
            if z is not None:
                dout *= silu(zs[i])
            mu = tl.exp(deltas[i] * decays) * (mu + dout * c.to(tl.float32))
            elapsed += deltas[i]
    tl.store(slot(total, batch, s, count, D) + d, elapsed, mask=d < D)
    tl.store(slot(end, batch, s, count, N * D) + n * D + d, mu, mask=live)
