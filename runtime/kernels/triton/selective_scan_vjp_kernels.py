"""The kernel of the selective scan's VJP.

A program is one warp that takes PASSES blocks of channels and walks one segment backwards, INTERVAL steps at a time, one block of
channels after the other. It first rebuilds the states at every STEPS-th step from the checkpoint and parks them in scratch that
it alone uses. Then, for STEPS steps and one state index n at a time, it runs the recurrence forwards and the adjoint backwards in
registers. dB and dC are sums over channels: a warp adds up its own and leaves one partial sum for all its blocks.

Bytes: x, dt, z, dy, dx, ddt, dz once, 14 per step and channel in bfloat16. For 16 states come on top: 2 for a checkpoint every 32
steps, 1 for the partial sums of dB and dC over 128 channels, and 192 over the steps of a segment for what enters it, what leaves
it and dA: 1.24 times the least with 512 steps, 1.43 times with 64, the fewest. Scratch (32 KiB a program) isn't counted: no more
programs are started than run at once, where the sizes allow it, and what all of them park fits in the L2 cache. Exponentials and
exchanges between lanes bound it on current GPUs, not bytes.

Legend: b batch, t time, d channels, n states, s segments, k checkpoints, e blocks of channels.
"""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import load_rows, row, sigmoid, silu, silu_slope, slot
from adjcomp.runtime.kernels.triton.selective_scan_kernels import bias_row, step_sizes


@triton.jit
def park_states(
    x, dt, A, B, bias, states, scratch, batch, block, stop, d, x_b, x_t, dt_b, dt_t, T, D, N, padded, SOFTPLUS: tl.constexpr,
    INTERVAL: tl.constexpr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """States before steps block, block + STEPS, … (below `stop`) into scratch (INTERVAL / STEPS, n, BLOCK_D)."""
    lane = tl.arange(0, BLOCK_D)[None, :]
    shift = bias_row(bias, d, D, BLOCK_D)
    checkpoints = tl.cdiv(T, INTERVAL) + 1
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)[:, None]
        live = (n < N) & (d < D)
        decays = tl.load(A + n * D + d, mask=live, other=0.0)
        h = tl.load(slot(states, batch, block // INTERVAL, checkpoints, N * D) + n * D + d, mask=live, other=0.0)
        tl.store(scratch + n * BLOCK_D + lane, h, mask=n < N)
        for part in range(1, INTERVAL // STEPS):
            t = block + (part - 1) * STEPS
            limit = tl.where(d < D, stop - t, 0)
            xs = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, STEPS)
            raws = load_rows(row(dt, batch, t, dt_b, dt_t), dt_t, d, limit, 0.0, STEPS)
            deltas = step_sizes(raws, shift, limit, SOFTPLUS, STEPS)
            for i in tl.static_range(STEPS):
                b = tl.load(slot(B, batch, 0, N, padded) + n.to(tl.int64) * padded + t + i, mask=n < N, other=0.0)
                h = tl.exp(deltas[i] * decays) * h + (deltas[i] * xs[i]) * b
            tl.store(scratch + (part * N + n) * BLOCK_D + lane, h, mask=n < N)


@triton.jit
def zeros(BLOCK_D: tl.constexpr, U: tl.constexpr):
    """U rows of zeros."""
    rows = ()
    for _ in tl.static_range(U):
        rows = rows + (tl.zeros((1, BLOCK_D), tl.float32),)
    return rows


@triton.jit
def one_state(
    A, B, C, h, mu, dA, dB, dC, d, deltas, xs, douts, dinputs, ddeltas, outs, n, later, started, D, padded,
    STEPS: tl.constexpr, WANT_OUT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """STEPS steps of state n, forwards then backwards; adds to the tuples of cotangents, and to mu and dA in memory.

    h: pointer to the states before the first step (n, BLOCK_D); mu, dA: pointers to (n, d); B, C, dB, dC: pointers to the first
    step of (n, padded), so that all addresses of a state are constants away from one. dB and dC are written, or added to where
    these aren't the program's first channels (`later`); dA likewise where these aren't their last steps (`started`).
    """
    decay = tl.load(A + n * D + d, mask=d < D, other=0.0)
    before = tl.load(h + n * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
    lam = tl.load(mu + n * D + d, mask=d < D, other=0.0)
    ddecay = tl.load(dA + n * D + d, mask=(d < D) & started, other=0.0)
    place = tl.cast(n, tl.int64) * padded
    B += place
    C += place
    dB += place
    dC += place
    states = (before,)
    factors = ()
    for i in tl.static_range(STEPS):
        factors = factors + (tl.exp(deltas[i] * decay),)
        states = states + (factors[i] * states[i] + deltas[i] * xs[i] * tl.load(B + i),)
    new_outs = ()
    new_dinputs = ()
    new_ddeltas = ()
    for i in tl.static_range(STEPS - 1, -1, -1):
        c = tl.load(C + i)
        lam += douts[i] * c
        tl.store(dB + i, tl.load(dB + i, mask=later, other=0.0) + tl.sum(lam * (deltas[i] * xs[i])))
        tl.store(dC + i, tl.load(dC + i, mask=later, other=0.0) + tl.sum(states[i + 1] * douts[i]))
        if WANT_OUT:
            new_outs = (outs[i] + states[i + 1] * c,) + new_outs
        new_dinputs = (dinputs[i] + lam * tl.load(B + i),) + new_dinputs
        lam *= factors[i]
        dlog = lam * states[i]
        ddecay += dlog * deltas[i]
        new_ddeltas = (ddeltas[i] + dlog * decay,) + new_ddeltas
    tl.store(mu + n * D + d, lam, mask=d < D)
    tl.store(dA + n * D + d, ddecay, mask=d < D)
    return new_dinputs, new_ddeltas, new_outs


@triton.jit
def few_steps(
    dy, x, dt, A, B, C, z, h, mu, dx, ddt, dz, dA, dB, dC, dy_b, dy_t, x_b, x_t, dt_b, dt_t, z_b, z_t, batch, t, stop, d, shift,
    through, sum_skip, sum_bias, later, started, T, D, N, padded, SOFTPLUS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """STEPS steps from t on of one block of channels; returns its sums of the cotangents of skip and bias so far."""
    limit = tl.where(d < D, stop - t, 0)
    xs = load_rows(row(x, batch, t, x_b, x_t), x_t, d, limit, 0.0, STEPS)
    deltas = step_sizes(load_rows(row(dt, batch, t, dt_b, dt_t), dt_t, d, limit, 0.0, STEPS), shift, limit, SOFTPLUS, STEPS)
    raw_douts = load_rows(row(dy, batch, t, dy_b, dy_t), dy_t, d, limit, 0.0, STEPS)
    douts = ()
    for i in tl.static_range(STEPS):
        if z is not None:
            gate = tl.load(row(z, batch, t + i, z_b, z_t) + d, mask=i < limit, other=0.0).to(tl.float32)
            douts = douts + (raw_douts[i] * silu(gate),)
        else:
            douts = douts + (raw_douts[i],)
    dinputs = zeros(BLOCK_D, STEPS)
    ddeltas = zeros(BLOCK_D, STEPS)
    outs = zeros(BLOCK_D, STEPS if z is not None else 0)
    for n in range(N):
        dinputs, ddeltas, outs = one_state(
            A, B, C, h, mu, dA, dB, dC, d, deltas, xs, douts, dinputs, ddeltas, outs, n, later, started, D, padded, STEPS,
            z is not None, BLOCK_D,
        )  # fmt: skip
    for i in tl.static_range(STEPS):
        # dt, z and dy are read again: held over the loop above they would cost registers
        place = slot(dx, batch, t + i, T, D) + d
        tl.store(place, (deltas[i] * dinputs[i] + through * douts[i]).to(dx.dtype.element_ty), mask=i < limit)
        draw = ddeltas[i] + xs[i] * dinputs[i]
        if SOFTPLUS:
            raw = tl.load(row(dt, batch, t + i, dt_b, dt_t) + d, mask=i < limit, other=0.0).to(tl.float32)
            draw *= sigmoid(raw + shift)
        draw = tl.where(i < limit, draw, 0.0)
        tl.store(slot(ddt, batch, t + i, T, D) + d, draw.to(ddt.dtype.element_ty), mask=i < limit)
        sum_bias += draw
        sum_skip += douts[i] * xs[i]
        if z is not None:
            gate = tl.load(row(z, batch, t + i, z_b, z_t) + d, mask=i < limit, other=0.0).to(tl.float32)
            dy_i = tl.load(row(dy, batch, t + i, dy_b, dy_t) + d, mask=i < limit, other=0.0).to(tl.float32)
            slope = dy_i * (outs[i] + through * xs[i]) * silu_slope(gate)
            tl.store(slot(dz, batch, t + i, T, D) + d, slope.to(dz.dtype.element_ty), mask=i < limit)
    return sum_skip, sum_bias


@triton.jit
def add_row(sums, given, d, mask, started):
    """Add a row to one in memory, or write it where none has been yet."""
    tl.store(sums + d, tl.load(sums + d, mask=mask & started, other=0.0) + given, mask=mask)


@triton.jit
def selective_scan_vjp(
    dy, x, dt, A, B, C, skip, z, bias, states, mu, scratch, dx, ddt, dz, dA, dB, dC, dskip, dbias, dy_b, dy_t, x_b, x_t, dt_b,
    dt_t, z_b, z_t, T, D, N, segment, count, padded, SOFTPLUS: tl.constexpr, INTERVAL: tl.constexpr,
    STEPS: tl.constexpr, PASSES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx, ddt, dz (b, t, d); dB, dC (b, e, n, padded); sums per segment dA (b, s, n, d), dskip, dbias (b, s, d).

    A (n, d) and B, C (b, n, padded) are float32; `padded` is T rounded up to INTERVAL, B and C are zero from T on. mu
    (b, s, n, d) holds what enters each segment at its end, and what leaves it at its start afterwards.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    e = tl.program_id(1)
    blocks = tl.num_programs(1)
    start = s * segment
    stop = tl.minimum(start + segment, T)
    parts: tl.constexpr = INTERVAL // STEPS
    scratch = slot(scratch, pid, e, blocks, parts * N * BLOCK_D)
    mu = slot(mu, batch, s, count, N * D)
    dA = slot(dA, batch, s, count, N * D)
    rounds = tl.cdiv(stop - start, INTERVAL)
    for k in range(rounds * PASSES):
        block = start + (rounds - 1 - k // PASSES) * INTERVAL
        d = ((e * PASSES + k % PASSES) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
        tl.debug_barrier()  # the parked states of the pass before have been read
        park_states(
            x, dt, A, B, bias, states, scratch, batch, block, stop, d, x_b, x_t, dt_b, dt_t, T, D, N, padded,
            SOFTPLUS, INTERVAL, STEPS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        shift = bias_row(bias, d, D, BLOCK_D)
        through = bias_row(skip, d, D, BLOCK_D)
        sum_skip = tl.zeros((1, BLOCK_D), tl.float32)
        sum_bias = sum_skip
        few = tl.cdiv(tl.minimum(block + INTERVAL, stop) - block, STEPS)
        for part in range(few):
            tl.debug_barrier()  # what other lanes wrote to memory is there
            t = block + (few - 1 - part) * STEPS
            h = scratch + (few - 1 - part) * (N * BLOCK_D)
            sum_skip, sum_bias = few_steps(
                dy, x, dt, A, slot(B, batch, 0, N, padded) + t, slot(C, batch, 0, N, padded) + t, z, h, mu, dx, ddt, dz, dA,
                slot(dB, batch, e, blocks, N * padded) + t, slot(dC, batch, e, blocks, N * padded) + t, dy_b, dy_t, x_b, x_t,
                dt_b, dt_t, z_b, z_t, batch, t, stop, d, shift, through, sum_skip, sum_bias, k % PASSES > 0,
                (k >= PASSES) | (part > 0), T, D, N, padded, SOFTPLUS, STEPS, BLOCK_D,
            )  # fmt: skip
        if dskip is not None:
            add_row(slot(dskip, batch, s, count, D), sum_skip, d, d < D, k >= PASSES)
        if dbias is not None:
            add_row(slot(dbias, batch, s, count, D), sum_bias, d, d < D, k >= PASSES)
