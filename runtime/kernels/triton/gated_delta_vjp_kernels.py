"""Kernels of the gated delta rule's VJP, given the states S before each chunk and the adjoint states λ after it.

With the forward's names (`gated_delta_kernels`), f = Aqkᵀ dy and Y = (1 + Akk diag β)^-1:

    dE = f + K̃ λ,  dR = Yᵀ diag β dE = dV,  λ_before = Γ_end λ - Mᵀ λ + Q̂ᵀ dy - K̂ᵀ (Yᵀ diag β f)
    dAqk = dy Eᵀ,  dAkk = -dR Eᵀ,  dβ[j] = P[j] · dE[j] - Σ_t Akk[t, j] dR[t] · P[j]
    dQ̂ = dy Sᵀ,  dK̂ = -dR Sᵀ,  dK̃ = E λᵀ

The cotangent of a log decay is the sum over all products that span its step, as in `ssd_vjp_kernels`. For a decay per channel the
products inside a chunk are known only summed, q ⊙ dq + k ⊙ dk of rows minus k ⊙ dk of columns, both without the diagonal. Where
sums before a step are taken as sums up to it minus its own, what doesn't decay at all (the diagonal, the last step towards the
chunk's end) is left out: under a strong decay its rounding would be larger than all the rest.

Legend: as in `gated_delta_kernels`; i blocks of key channels.
"""

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import slot
from adjcomp.runtime.kernels.triton.gated_delta_kernels import SUB
from adjcomp.runtime.kernels.triton.gated_delta_tiles import (
    betas_of,
    decays,
    inner,
    square,
    state_block,
    store_inner,
    store_square,
    whole_decay,
    written_rows,
)
from adjcomp.runtime.kernels.triton.ssd_kernels import decay_slice, steps, store_tile, tile


@triton.jit
def delta_vjp_values(
    k, log, betas, solved, moved, direct, states, adjoints, k_b, k_t, T, H, K, V, chunks, WIDE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """In place: solved = Y V becomes P, direct = Aqkᵀ dy becomes dE, both (b, h, t', v)."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V
    for j in range(0, Q, BLOCK_J):
        t = chunk * Q + j
        written = written_rows(
            betas, solved, moved, states, batch, h, chunk, j, v, H, K, V, chunks, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_K, BLOCK_V
        )  # fmt: skip
        store_inner(solved, written, batch, h, H, t, v, chunks * Q, V, BLOCK_J, BLOCK_V)
        total = inner(direct, batch, h, H, t, v, chunks * Q, V, BLOCK_J, BLOCK_V)
        for c in range(0, K, BLOCK_K):
            rows = tile(k + h * K, batch, t, c, k_b, k_t, T, K, BLOCK_J, BLOCK_K).to(tl.float32)
            rows *= decays(log, batch, h, H, chunk, j, c, chunks, K, True, WIDE, Q, BLOCK_J, BLOCK_K)
            lam = state_block(adjoints, batch, chunk + 1, h, c, v, H, K, V, chunks + 1, BLOCK_K, BLOCK_V).to(OPERAND)
            total = tl.dot(rows.to(OPERAND), lam, total, input_precision=PRECISION)
        store_inner(direct, total, batch, h, H, t, v, chunks * Q, V, BLOCK_J, BLOCK_V)


@triton.jit
def delta_vjp_scores(
    dy, betas, of_keys, of_queries, written, direct, returned, dkeys, dqueries, dbeta, inside, dy_b, dy_t, T, H, V, chunks,
    WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dAkk, dAqk (b, h, c, q, q), dbeta (b, h, t'), and for one decay per head the products inside the chunk (b, h, t').

    written = P, direct = dE, returned = dR, all (b, h, t', v).
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    t = chunk * Q
    queries = tl.zeros((Q, Q), tl.float32)
    keys = tl.zeros((Q, Q), tl.float32)
    grad = tl.zeros((Q,), tl.float32)
    for v in range(0, V, BLOCK_V):
        values = inner(written, batch, h, H, t, v, chunks * Q, V, Q, BLOCK_V)
        grad += tl.sum(values * inner(direct, batch, h, H, t, v, chunks * Q, V, Q, BLOCK_V), 1)
        values = tl.trans(values.to(OPERAND))
        left = tile(dy + h * V, batch, t, v, dy_b, dy_t, T, V, Q, BLOCK_V).to(OPERAND)
        queries = tl.dot(left, values, queries, input_precision=PRECISION)
        left = inner(returned, batch, h, H, t, v, chunks * Q, V, Q, BLOCK_V).to(OPERAND)
        keys = tl.dot(left, values, keys, input_precision=PRECISION)
    beta = betas_of(betas, batch, h, H, t, chunks * Q, Q)[None, :]
    rows = tl.arange(0, Q)[:, None]
    columns = tl.arange(0, Q)[None, :]
    held = square(of_keys, batch, h, H, chunk, chunks, 0, 0, Q, Q, Q)
    grad -= tl.sum(held * keys, 0)
    tl.store(slot(dbeta, batch * H + h, chunk, chunks, Q) + tl.arange(0, Q), grad)
    keys = tl.where(rows > columns, -keys * beta, 0.0)
    queries = tl.where(rows >= columns, queries * beta, 0.0)
    store_square(dkeys, keys, batch, h, H, chunk, chunks, 0, Q, Q)
    store_square(dqueries, queries, batch, h, H, chunk, chunks, 0, Q, Q)
    if not WIDE:
        scores = square(of_queries, batch, h, H, chunk, chunks, 0, 0, Q, Q, Q)
        pairs = keys * held + tl.where(rows > columns, queries * scores, 0.0)
        before = tl.cumsum(pairs, 1) - pairs
        sums = tl.sum(tl.where(rows >= columns, before, 0.0), 0)
        tl.store(slot(inside, batch * H + h, chunk, chunks, Q) + tl.arange(0, Q), sums)


@triton.jit
def outer_parts(
    dy, betas, written, returned, states, adjoints, batch, chunk, h, k, dy_b, dy_t, T, H, K, V, chunks, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dQ̂, dK̂, dK̃ (Q, BLOCK_K), and Σ_v S λ per key channel (BLOCK_K)."""
    t = chunk * Q
    dq = tl.zeros((Q, BLOCK_K), tl.float32)
    dk_start = tl.zeros((Q, BLOCK_K), tl.float32)
    dk_end = tl.zeros((Q, BLOCK_K), tl.float32)
    over = tl.zeros((BLOCK_K,), tl.float32)
    beta = betas_of(betas, batch, h, H, t, chunks * Q, Q)[:, None]
    for v in range(0, V, BLOCK_V):
        held = state_block(states, batch, chunk, h, k, v, H, K, V, chunks + 1, BLOCK_K, BLOCK_V)
        lam = state_block(adjoints, batch, chunk + 1, h, k, v, H, K, V, chunks + 1, BLOCK_K, BLOCK_V)
        over += tl.sum(held * lam, 1)
        held = tl.trans(held.to(OPERAND))
        left = tile(dy + h * V, batch, t, v, dy_b, dy_t, T, V, Q, BLOCK_V).to(OPERAND)
        dq = tl.dot(left, held, dq, input_precision=PRECISION)
        left = (-inner(returned, batch, h, H, t, v, chunks * Q, V, Q, BLOCK_V)).to(OPERAND)
        dk_start = tl.dot(left, held, dk_start, input_precision=PRECISION)
        left = (inner(written, batch, h, H, t, v, chunks * Q, V, Q, BLOCK_V) * beta).to(OPERAND)
        dk_end = tl.dot(left, tl.trans(lam.to(OPERAND)), dk_end, input_precision=PRECISION)
    return dq, dk_start, dk_end, over


@triton.jit
def delta_vjp_keys(
    dy, q, k, log, betas, written, returned, states, adjoints, dkeys, dqueries, dq, dk, seen, carried, spanning, dy_b, dy_t, q_b,
    q_t, k_b, k_t, T, H, K, V, chunks, WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq, dk (b, t, h, k) for one decay per head, and the products that decay from the chunk's start, to its end, and over it.

    seen, carried: (b, i, h, t'); spanning: (b, i, c, h).
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_K
    part = batch * tl.num_programs(2) + tl.program_id(2)
    t = chunk * Q
    grad_q, grad_k, grad_end, over = outer_parts(
        dy, betas, written, returned, states, adjoints, batch, chunk, h, c, dy_b, dy_t, T, H, K, V, chunks, OPERAND, PRECISION, Q,
        BLOCK_K, BLOCK_V,
    )  # fmt: skip
    start = decays(log, batch, h, H, chunk, 0, c, chunks, K, False, WIDE, Q, Q, BLOCK_K)
    end = decays(log, batch, h, H, chunk, 0, c, chunks, K, True, WIDE, Q, Q, BLOCK_K)
    grad_q *= start
    grad_k *= start
    grad_end *= end
    queries = tile(q + h * K, batch, t, c, q_b, q_t, T, K, Q, BLOCK_K).to(tl.float32)
    keys = tile(k + h * K, batch, t, c, k_b, k_t, T, K, Q, BLOCK_K).to(tl.float32)
    place = slot(seen, part * H + h, chunk, chunks, Q) + tl.arange(0, Q)
    tl.store(place, tl.sum(queries * grad_q + keys * grad_k, 1))
    tl.store(slot(carried, part * H + h, chunk, chunks, Q) + tl.arange(0, Q), tl.sum(keys * grad_end, 1))
    whole = tl.load(slot(log, batch * H + h, chunk, chunks, Q) + (Q - 1)).to(tl.float32)
    tl.store(slot(spanning, part, chunk, chunks, H) + h, tl.sum(over) * tl.exp(whole))
    grad_k += grad_end
    for j in range(0, Q, BLOCK_J):
        keys_j = tile(k + h * K, batch, t + j, c, k_b, k_t, T, K, BLOCK_J, BLOCK_K).to(OPERAND)
        queries_j = tile(q + h * K, batch, t + j, c, q_b, q_t, T, K, BLOCK_J, BLOCK_K).to(OPERAND)
        decay = decay_slice(log, batch, chunk, h, j, H, chunks, False, Q, BLOCK_J)
        left = (square(dqueries, batch, h, H, chunk, chunks, 0, j, Q, Q, BLOCK_J) * decay).to(OPERAND)
        grad_q = tl.dot(left, keys_j, grad_q, input_precision=PRECISION)
        left = (square(dkeys, batch, h, H, chunk, chunks, 0, j, Q, Q, BLOCK_J) * decay).to(OPERAND)
        grad_k = tl.dot(left, keys_j, grad_k, input_precision=PRECISION)
        decay = decay_slice(log, batch, chunk, h, j, H, chunks, True, Q, BLOCK_J)
        left = (tl.trans(square(dqueries, batch, h, H, chunk, chunks, j, 0, Q, BLOCK_J, Q)) * decay).to(OPERAND)
        grad_k = tl.dot(left, queries_j, grad_k, input_precision=PRECISION)
        left = (tl.trans(square(dkeys, batch, h, H, chunk, chunks, j, 0, Q, BLOCK_J, Q)) * decay).to(OPERAND)
        grad_k = tl.dot(left, keys_j, grad_k, input_precision=PRECISION)
    store_tile(dq + h * K, grad_q, batch, t, c, T, H * K, K, Q, BLOCK_K)
    store_tile(dk + h * K, grad_k, batch, t, c, T, H * K, K, Q, BLOCK_K)


@triton.jit
def delta_vjp_gates(
    inside, seen, carried, spanning, dg, T, H, chunks, parts, Q: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """dg (b, t, h) for one decay per head, from what the kernels above left in parts i."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    from_start = tl.zeros((Q,), tl.float32)
    to_end = from_start
    over = 0.0
    for i in range(parts):
        from_start += steps(seen, batch * parts + i, chunk, h, H, chunks, 0, Q, Q)
        to_end += steps(carried, batch * parts + i, chunk, h, H, chunks, 0, Q, Q)
        over += tl.load(slot(spanning, batch * parts + i, chunk, chunks, H) + h)
    grad = steps(inside, batch, chunk, h, H, chunks, 0, Q, Q) + tl.cumsum(from_start, 0, reverse=True)
    q = tl.arange(0, Q)
    to_end = tl.where(q < tl.minimum(T - chunk * Q, Q) - 1, to_end, 0.0)
    grad += tl.cumsum(to_end, 0) - to_end + over
    tl.store(slot(dg, batch, chunk * Q, T, H) + (q * H + h), grad, mask=chunk * Q + q < T)


@triton.jit
def delta_vjp_inside(
    q, k, log, dkeys, dqueries, dq_rows, dk_rows, dk_columns, q_b, q_t, k_b, k_t, T, H, K, chunks, PRECISION: tl.constexpr,
    Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What dAqk and dAkk give to 16 steps, for a decay per channel and without Aqk's diagonal; all (b, h, t', k).

    dq and dk as rows of A decay from earlier steps, relative to the first of the 16; dk as columns towards later ones, relative
    to the last.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    blocks = tl.cdiv(K, BLOCK_K)
    r0 = tl.program_id(2) // blocks * SUB
    c = tl.program_id(2) % blocks * BLOCK_K
    t = chunk * Q
    length = chunks * Q
    own = inner(log, batch, h, H, t + r0, c, length, K, SUB, BLOCK_K)
    first = inner(log, batch, h, H, t + r0, c, length, K, 1, BLOCK_K)
    last = inner(log, batch, h, H, t + r0 + SUB - 1, c, length, K, 1, BLOCK_K)
    grad_q = tl.zeros((SUB, BLOCK_K), tl.float32)
    grad_k = tl.zeros((SUB, BLOCK_K), tl.float32)
    grad_c = tl.zeros((SUB, BLOCK_K), tl.float32)
    for j in range(0, Q, SUB):
        sums = inner(log, batch, h, H, t + j, c, length, K, SUB, BLOCK_K)
        keys = tile(k + h * K, batch, t + j, c, k_b, k_t, T, K, SUB, BLOCK_K).to(tl.float32)
        if j < r0:
            keys *= tl.exp(first - sums)
            left = square(dqueries, batch, h, H, chunk, chunks, r0, j, Q, SUB, SUB)
            grad_q = tl.dot(left, keys, grad_q, input_precision=PRECISION)
            left = square(dkeys, batch, h, H, chunk, chunks, r0, j, Q, SUB, SUB)
            grad_k = tl.dot(left, keys, grad_k, input_precision=PRECISION)
        if j > r0:
            factor = tl.exp(sums - last)
            keys *= factor
            left = tl.trans(square(dkeys, batch, h, H, chunk, chunks, j, r0, Q, SUB, SUB))
            grad_c = tl.dot(left, keys, grad_c, input_precision=PRECISION)
            queries = tile(q + h * K, batch, t + j, c, q_b, q_t, T, K, SUB, BLOCK_K).to(tl.float32) * factor
            left = tl.trans(square(dqueries, batch, h, H, chunk, chunks, j, r0, Q, SUB, SUB))
            grad_c = tl.dot(left, queries, grad_c, input_precision=PRECISION)
    grad_q *= tl.exp(own - first)
    grad_k *= tl.exp(own - first)
    grad_c *= tl.exp(last - own)
    r = tl.arange(0, SUB)
    for i in range(SUB):
        sums = inner(log, batch, h, H, t + r0 + i, c, length, K, 1, BLOCK_K)
        key = tile(k + h * K, batch, t + r0 + i, c, k_b, k_t, T, K, 1, BLOCK_K).to(tl.float32)
        query = tile(q + h * K, batch, t + r0 + i, c, q_b, q_t, T, K, 1, BLOCK_K).to(tl.float32)
        later = tl.exp(tl.where(r[:, None] > i, own - sums, float("-inf")))
        earlier = tl.exp(tl.where(r[:, None] < i, sums - own, float("-inf")))
        grad_q += square(dqueries, batch, h, H, chunk, chunks, r0, r0 + i, Q, SUB, 1) * key * later
        grad_k += square(dkeys, batch, h, H, chunk, chunks, r0, r0 + i, Q, SUB, 1) * key * later
        row_q = tl.trans(square(dqueries, batch, h, H, chunk, chunks, r0 + i, r0, Q, 1, SUB))
        row_k = tl.trans(square(dkeys, batch, h, H, chunk, chunks, r0 + i, r0, Q, 1, SUB))
        grad_c += (row_q * query + row_k * key) * earlier
    store_inner(dq_rows, grad_q, batch, h, H, t + r0, c, length, K, SUB, BLOCK_K)
    store_inner(dk_rows, grad_k, batch, h, H, t + r0, c, length, K, SUB, BLOCK_K)
    store_inner(dk_columns, grad_c, batch, h, H, t + r0, c, length, K, SUB, BLOCK_K)


@triton.jit
def delta_vjp_keys_wide(
    dy, q, k, log, betas, written, returned, states, adjoints, dqueries, dq_rows, dk_rows, dk_columns, dq, dk, dg, dy_b, dy_t,
    q_b, q_t, k_b, k_t, T, H, K, V, chunks, WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg (b, t, h, k) for a decay per channel."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_K
    t = chunk * Q
    grad_q, grad_k, grad_end, over = outer_parts(
        dy, betas, written, returned, states, adjoints, batch, chunk, h, c, dy_b, dy_t, T, H, K, V, chunks, OPERAND, PRECISION, Q,
        BLOCK_K, BLOCK_V,
    )  # fmt: skip
    start = decays(log, batch, h, H, chunk, 0, c, chunks, K, False, WIDE, Q, Q, BLOCK_K)
    queries = tile(q + h * K, batch, t, c, q_b, q_t, T, K, Q, BLOCK_K).to(tl.float32)
    keys = tile(k + h * K, batch, t, c, k_b, k_t, T, K, Q, BLOCK_K).to(tl.float32)
    grad_q = grad_q * start + inner(dq_rows, batch, h, H, t, c, chunks * Q, K, Q, BLOCK_K)
    grad_k = grad_k * start + inner(dk_rows, batch, h, H, t, c, chunks * Q, K, Q, BLOCK_K)
    grad_end *= decays(log, batch, h, H, chunk, 0, c, chunks, K, True, WIDE, Q, Q, BLOCK_K)
    columns = inner(dk_columns, batch, h, H, t, c, chunks * Q, K, Q, BLOCK_K)
    kept = tl.where(tl.arange(0, Q)[:, None] < tl.minimum(T - t, Q) - 1, keys * grad_end, 0.0)
    grad_g = tl.cumsum(queries * grad_q + keys * (grad_k - columns), 0, reverse=True) + (tl.cumsum(kept, 0) - kept)
    over *= tl.reshape(whole_decay(log, batch, h, H, chunk, c, chunks, K, WIDE, Q, BLOCK_K), (BLOCK_K,))
    store_tile(dg + h * K, grad_g + over[None, :], batch, t, c, T, H * K, K, Q, BLOCK_K)
    r = tl.arange(0, Q)[:, None]
    diagonal = tl.load(slot(dqueries, batch * H + h, chunk, chunks, Q * Q) + r * (Q + 1))
    store_tile(dq + h * K, grad_q + diagonal * keys, batch, t, c, T, H * K, K, Q, BLOCK_K)
    store_tile(dk + h * K, grad_k + columns + grad_end + diagonal * queries, batch, t, c, T, H * K, K, Q, BLOCK_K)
