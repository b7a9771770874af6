"""Kernels of SSD's VJP, given the states before each chunk and the adjoint states λ after it.

With u = δ x, mix[q, j] = (C[q] · B[j]) decay(q, j) and dout the cotangent of the output before the gate:

- `ssd_vjp_gates` repeats the outputs before the gate, for dz and dD;
- `ssd_vjp_inputs` gives du = mixᵀ dout + until (B λᵀ), and from it dx and δ's part of its cotangent;
- `ssd_vjp_decays` adds the decays' part. The cotangent of a log decay at step t is the sum over all products that span it,
  j < t <= q: prefix sums of pairs, so that nothing large cancels;
- `ssd_vjp_shared` gives dC = (dout uᵀ · decay) B + since dout h, or likewise dB, summed over some heads of a group.

Bytes: each reads x, dy, z and (but for the third) one state per chunk once, B and C once per head, from L2; the first writes dz,
the second dx, the third ddt, the last one partial sum per set of heads.

Legend: b batch, t time, c chunk, q (and j) steps of a chunk, h heads, p channels of a head, i blocks of them, g groups, n states,
e sets of heads.
"""

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import row, sigmoid, silu, silu_slope, slot, softplus
from adjcomp.runtime.kernels.triton.ssd_kernels import (
    before_gate,
    decay_slice,
    products,
    since_start,
    state_tile,
    steps,
    store_tile,
    tile,
    until_end,
)


@triton.jit
def scaled(
    v, z, delta, batch, chunk, j, h, p, v_b, v_t, z_b, z_t, T, H, P, chunks, INPUT: tl.constexpr, Q: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Steps j … of a chunk (ROWS, BLOCK_P): u = δ x for INPUT, else dout, where v is x or dy, and z the gates."""
    t = chunk * Q + j
    rows = tile(v + h * P, batch, t, p, v_b, v_t, T, P, ROWS, BLOCK_P).to(tl.float32)
    if INPUT:
        rows *= steps(delta, batch, chunk, h, H, chunks, j, Q, ROWS)[:, None]
    elif z is not None:
        rows *= silu(tile(z + h * P, batch, t, p, z_b, z_t, T, P, ROWS, BLOCK_P).to(tl.float32))
    return rows


@triton.jit
def ssd_vjp_gates(
    dy, x, B, C, skip, z, delta, log, states, dz, seen, dskip, dy_b, dy_t, x_b, x_t, B_b, B_t, C_b, C_t, z_b, z_t, T, H, P, N,
    per_group, chunks, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz (b, t, h, p), dD of each chunk, dskip (b, i, c, h), and what decays from the chunk's start to t, seen (b, i, h, t')."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P
    part = batch * tl.num_programs(2) + tl.program_id(2)
    t = chunk * Q
    from_state, out = before_gate(
        x, B, C, skip, delta, log, states, batch, chunk, h, p, x_b, x_t, B_b, B_t, C_b, C_t, T, H, P, N, per_group, chunks,
        OPERAND, PRECISION, Q, BLOCK_J, BLOCK_P, BLOCK_N,
    )  # fmt: skip
    dout = tile(dy + h * P, batch, t, p, dy_b, dy_t, T, P, Q, BLOCK_P).to(tl.float32)
    if z is not None:
        gate = tile(z + h * P, batch, t, p, z_b, z_t, T, P, Q, BLOCK_P).to(tl.float32)
        store_tile(dz + h * P, dout * out * silu_slope(gate), batch, t, p, T, H * P, P, Q, BLOCK_P)
        dout *= silu(gate)
    tl.store(slot(seen, part * H + h, chunk, chunks, Q) + tl.arange(0, Q), tl.sum(dout * from_state, 1))
    values = tile(x + h * P, batch, t, p, x_b, x_t, T, P, Q, BLOCK_P).to(tl.float32)
    tl.store(slot(dskip, part, chunk, chunks, H) + h, tl.sum(dout * values))


@triton.jit
def ssd_vjp_inputs(
    dy, x, B, C, skip, z, delta, log, states, adjoints, dx, ddelta, carried, spanning, dy_b, dy_t, x_b, x_t, B_b, B_t, C_b, C_t,
    z_b, z_t, T, H, P, N, per_group, chunks, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx (b, t, h, p); ddelta (b, i, h, t') without the decays' part; what decays from t to the chunk's end, carried
    (b, i, h, t'), and over the chunk, spanning (b, i, c, h).
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P
    part = batch * tl.num_programs(2) + tl.program_id(2)
    t = chunk * Q
    keys = B + h // per_group * N
    queries = C + h // per_group * N
    dinputs = tl.zeros((Q, BLOCK_P), tl.float32)
    over = 0.0
    for n in range(0, N, BLOCK_N):
        lam = state_tile(adjoints, batch, chunk + 1, h, p, n, H, P, N, chunks + 1, BLOCK_P, BLOCK_N)
        over += tl.sum(lam * state_tile(states, batch, chunk, h, p, n, H, P, N, chunks + 1, BLOCK_P, BLOCK_N))
        left = tile(keys, batch, t, n, B_b, B_t, T, N, Q, BLOCK_N).to(OPERAND)
        dinputs = tl.dot(left, tl.trans(lam.to(OPERAND)), dinputs, input_precision=PRECISION)
    dinputs *= until_end(log, batch, chunk, h, H, chunks, Q)[:, None]
    sizes = steps(delta, batch, chunk, h, H, chunks, 0, Q, Q)
    values = tile(x + h * P, batch, t, p, x_b, x_t, T, P, Q, BLOCK_P).to(tl.float32)
    own = slot(carried, part * H + h, chunk, chunks, Q) + tl.arange(0, Q)
    tl.store(own, tl.sum(values * dinputs, 1) * sizes)
    for j in range(0, Q, BLOCK_J):
        mix = products(keys, queries, batch, t, j, B_b, B_t, C_b, C_t, T, N, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_N)
        mix = (mix * decay_slice(log, batch, chunk, h, j, H, chunks, True, Q, BLOCK_J)).to(OPERAND)
        dout = scaled(dy, z, delta, batch, chunk, j, h, p, dy_b, dy_t, z_b, z_t, T, H, P, chunks, False, Q, BLOCK_J, BLOCK_P)
        dinputs = tl.dot(mix, dout.to(OPERAND), dinputs, input_precision=PRECISION)
    own = slot(ddelta, part * H + h, chunk, chunks, Q) + tl.arange(0, Q)
    tl.store(own, tl.sum(values * dinputs, 1))
    dinputs *= sizes[:, None]
    if skip is not None:
        dout = scaled(dy, z, delta, batch, chunk, 0, h, p, dy_b, dy_t, z_b, z_t, T, H, P, chunks, False, Q, Q, BLOCK_P)
        dinputs += dout * tl.load(skip + h)
    store_tile(dx + h * P, dinputs, batch, t, p, T, H * P, P, Q, BLOCK_P)
    whole = tl.load(slot(log, batch * H + h, chunk, chunks, Q) + (Q - 1))
    tl.store(slot(spanning, part, chunk, chunks, H) + h, over * tl.exp(whole.to(tl.float32)))


@triton.jit
def log_decay_vjp(pairs, seen, carried, spanning, count, Q: tl.constexpr):
    """Cotangent of each step's log decay (q).

    pairs (q, j) are products that decay from j to q; seen (q) those from the chunk's start to q; carried (q) those from q to its
    end, after `count` steps; `spanning` what decays over all of it. What doesn't decay at all is left out before sums up to a
    step lose its own again: under a strong decay its rounding would be larger than all the rest.
    """
    q = tl.arange(0, Q)
    pairs = tl.where(q[:, None] > q[None, :], pairs, 0.0)
    carried = tl.where(q < count - 1, carried, 0.0)
    before = tl.cumsum(pairs, 1) - pairs
    inside = tl.sum(tl.where(q[:, None] >= q[None, :], before, 0.0), 0)
    return inside + tl.cumsum(seen, 0, reverse=True) + (tl.cumsum(carried, 0) - carried) + spanning


@triton.jit
def ssd_vjp_decays(
    dy, x, dt, A, B, C, z, bias, delta, log, seen, carried, ddelta, spanning, ddt, dA, low, high, dy_b, dy_t, x_b, x_t, dt_b,
    dt_t, B_b, B_t, C_b, C_t, z_b, z_t, T, H, P, N, per_group, chunks, seen_parts, parts, SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ddt (b, t, h) and dA of each chunk (b, c, h), from what the kernels above left in parts i."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    t = chunk * Q
    group = h // per_group * N
    mix = products(C + group, B + group, batch, t, 0, C_b, C_t, B_b, B_t, T, N, OPERAND, PRECISION, Q, Q, BLOCK_N)
    sizes = steps(delta, batch, chunk, h, H, chunks, 0, Q, Q)
    dmix = tl.zeros((Q, Q), tl.float32)
    for p in range(0, P, BLOCK_P):
        inputs = scaled(x, z, delta, batch, chunk, 0, h, p, x_b, x_t, z_b, z_t, T, H, P, chunks, True, Q, Q, BLOCK_P)
        dout = scaled(dy, z, delta, batch, chunk, 0, h, p, dy_b, dy_t, z_b, z_t, T, H, P, chunks, False, Q, Q, BLOCK_P)
        dmix = tl.dot(dout.to(OPERAND), tl.trans(inputs.to(OPERAND)), dmix, input_precision=PRECISION)
    pairs = dmix * mix * decay_slice(log, batch, chunk, h, 0, H, chunks, False, Q, Q)
    to_start = tl.zeros((Q,), tl.float32)
    to_end = to_start
    own = to_start
    over = 0.0
    for i in range(seen_parts):
        to_start += steps(seen, batch * seen_parts + i, chunk, h, H, chunks, 0, Q, Q)
    for i in range(parts):
        to_end += steps(carried, batch * parts + i, chunk, h, H, chunks, 0, Q, Q)
        own += steps(ddelta, batch * parts + i, chunk, h, H, chunks, 0, Q, Q)
        over += tl.load(slot(spanning, batch * parts + i, chunk, chunks, H) + h)
    dlog = log_decay_vjp(pairs, to_start, to_end, over, tl.minimum(T - t, Q), Q)
    own += dlog * tl.load(A + h)
    q = tl.arange(0, Q)
    raw = tl.load(row(dt, batch, t, dt_b, dt_t) + (q * dt_t + h), mask=t + q < T, other=0.0).to(tl.float32)
    if bias is not None:
        raw += tl.load(bias + h)
    if LIMITED:
        bound = raw
        if SOFTPLUS:
            bound = softplus(raw)
        own = tl.where((bound >= low) & (bound <= high), own, 0.0)
    if SOFTPLUS:
        own *= sigmoid(raw)
    tl.store(slot(ddt, batch, t, T, H) + (q * H + h), own, mask=t + q < T)
    tl.store(slot(dA, batch, chunk, chunks, H) + h, tl.sum(dlog * sizes))


@triton.jit
def ssd_vjp_shared(
    left, right, other, z, delta, log, states, out, left_b, left_t, right_b, right_t, other_b, other_t, z_b, z_t, T, H, P, N, G,
    per_group, heads, chunks, BACK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Partial dC (b, e, t, g, n) of each set e of `heads` heads of a group: left is dy, right x, other B, states those before.

    BACK: partial dB, with left x, right dy, other C, and the adjoints after each chunk as states.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    sets = tl.cdiv(per_group, heads)
    group = tl.program_id(1) // sets
    e = tl.program_id(1) % sets
    n = tl.program_id(2) * BLOCK_N
    t = chunk * Q
    total = tl.zeros((Q, BLOCK_N), tl.float32)
    for i in range(e * heads, tl.minimum(e * heads + heads, per_group)):
        h = group * per_group + i
        if BACK:
            weight = until_end(log, batch, chunk, h, H, chunks, Q)
        else:
            weight = since_start(log, batch, chunk, h, H, chunks, Q)
        for p in range(0, P, BLOCK_P):
            rows = scaled(
                left, z, delta, batch, chunk, 0, h, p, left_b, left_t, z_b, z_t, T, H, P, chunks, BACK, Q, Q, BLOCK_P
            )  # fmt: skip
            held = state_tile(states, batch, chunk + (1 if BACK else 0), h, p, n, H, P, N, chunks + 1, BLOCK_P, BLOCK_N)
            total = tl.dot((rows * weight[:, None]).to(OPERAND), held.to(OPERAND), total, input_precision=PRECISION)
        for j in range(0, Q, BLOCK_J):
            scores = tl.zeros((Q, BLOCK_J), tl.float32)
            for p in range(0, P, BLOCK_P):
                rows = scaled(
                    left, z, delta, batch, chunk, 0, h, p, left_b, left_t, z_b, z_t, T, H, P, chunks, BACK, Q, Q, BLOCK_P
                )  # fmt: skip
                columns = scaled(
                    right, z, delta, batch, chunk, j, h, p, right_b, right_t, z_b, z_t, T, H, P, chunks, not BACK, Q, BLOCK_J,
                    BLOCK_P,
                )  # fmt: skip
                scores = tl.dot(rows.to(OPERAND), tl.trans(columns.to(OPERAND)), scores, input_precision=PRECISION)
            scores = (scores * decay_slice(log, batch, chunk, h, j, H, chunks, BACK, Q, BLOCK_J)).to(OPERAND)
            shared = tile(other + group * N, batch, t + j, n, other_b, other_t, T, N, BLOCK_J, BLOCK_N).to(OPERAND)
            total = tl.dot(scores, shared, total, input_precision=PRECISION)
    store_tile(out + group * N, total, batch * sets + e, t, n, T, G * N, N, Q, BLOCK_N)
