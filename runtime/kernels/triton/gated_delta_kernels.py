"""Kernels of the gated delta rule's forward: chunks of Q steps as matrix products (the WY form of Yang et al. 2024).

With Γ the decay since the chunk's start, K̂ = Γ K, Q̂ = Γ Q, K̃ = K times the decay to its end, and S the state before the chunk:

    Akk[t, j] = k[t] · k[j] decay(t, j) for j < t,  Aqk[t, j] = q[t] · k[j] decay(t, j) for j <= t,  Y = (1 + Akk diag β)^-1
    P = Y (V - K̂ S) = Y V - (Y K̂) S,  E = diag β P
    y = Q̂ S + Aqk E,  S' = Γ_end S + K̃ᵀ E = Γ_end S - M S + K̃ᵀ diag β Y V  with  M = K̃ᵀ diag β Y K̂

so that all but the walk S -> S' over chunks is parallel. Y comes from forward substitution: powers of Akk may be huge where Y is
not. Products over time or channels are cut into slices of BLOCK_J, since exact float32 products hold whole rows in registers.

A decay per channel is applied to 16 steps at a time relative to one of them, so that no exponent is ever positive.

Bytes: per chunk and head each kernel reads its operands once and writes its result once; the intermediates (Y, M, P, …) are
what makes the form parallel, and are several times the bytes of q, k, v: this op is bound by the walk and by products.

Legend: b batch, t time, c chunk, q (and j) steps of a chunk, h heads, k key channels, v value channels; t' is time padded to
whole chunks. Everything made here is laid out (b, h, t', …) or (b, h, c, …).
"""

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import row, slot
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
from adjcomp.runtime.kernels.triton.ssd_kernels import decay_slice, products, tile

SUB: tl.constexpr = tl.constexpr(16)  # steps whose decays per channel are taken relative to one of them


@triton.jit
def delta_steps(
    g, beta, log, betas, g_b, g_t, beta_b, beta_t, T, H, chunks, Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """β in float32, 0 from T on, and the sums of g from the chunk's start in float64, both (b, h, t'); g may be None."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    q = tl.arange(0, Q)[:, None]
    inside = (chunk * Q + q < T) & (h < H)
    value = tl.load(row(beta, batch, chunk * Q, beta_b, beta_t) + (q * beta_t + h), mask=inside, other=0.0).to(tl.float32)
    tl.store(slot(betas, batch * H + h, chunk, chunks, Q) + q, value, mask=h < H)
    if g is not None:
        decay = tl.load(row(g, batch, chunk * Q, g_b, g_t) + (q * g_t + h), mask=inside, other=0.0)
        tl.store(slot(log, batch * H + h, chunk, chunks, Q) + q, tl.cumsum(decay.to(tl.float64), 0), mask=h < H)


@triton.jit
def delta_sums(g, log, g_b, g_t, T, H, K, chunks, Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of log decays per channel from the chunk's start, log (b, h, t', k) in float32."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_K
    sums = tl.cumsum(tile(g + h * K, batch, chunk * Q, first, g_b, g_t, T, K, Q, BLOCK_K).to(tl.float32), 0)
    k = first + tl.arange(0, BLOCK_K)[None, :]
    tl.store(slot(log, batch * H + h, chunk, chunks, Q * K) + (tl.arange(0, Q)[:, None] * K + k), sums, mask=k < K)


@triton.jit
def delta_scores(
    q, k, log, of_keys, of_queries, q_b, q_t, k_b, k_t, T, H, K, chunks, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Akk and Aqk (b, h, c, q, q) for one decay per head."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    t = chunk * Q
    for j in range(0, Q, BLOCK_J):
        decay = decay_slice(log, batch, chunk, h, j, H, chunks, False, Q, BLOCK_J)
        rows = products(q + h * K, k + h * K, batch, t, j, q_b, q_t, k_b, k_t, T, K, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_K)
        store_square(of_queries, rows * decay, batch, h, H, chunk, chunks, j, Q, BLOCK_J)
        rows = products(k + h * K, k + h * K, batch, t, j, k_b, k_t, k_b, k_t, T, K, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_K)
        below = tl.arange(0, Q)[:, None] > (j + tl.arange(0, BLOCK_J))[None, :]
        store_square(of_keys, tl.where(below, rows * decay, 0.0), batch, h, H, chunk, chunks, j, Q, BLOCK_J)


@triton.jit
def delta_scores_wide(
    q, k, log, of_keys, of_queries, q_b, q_t, k_b, k_t, T, H, K, chunks, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The rows of 16 steps (grid axis 2) of Akk and Aqk (b, h, c, q, q) for a decay per channel.

    Columns before those steps: both sides decay to the first of the rows. Their own columns: one after the other.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    r0 = tl.program_id(2) * SUB
    t = chunk * Q
    r = tl.arange(0, SUB)
    steps = chunks * Q
    keys_out = slot(of_keys, batch * H + h, chunk, chunks, Q * Q) + (r0 + r) * Q
    queries_out = slot(of_queries, batch * H + h, chunk, chunks, Q * Q) + (r0 + r) * Q
    for j0 in range(0, Q, SUB):
        keys = tl.zeros((SUB, SUB), tl.float32)
        queries = tl.zeros((SUB, SUB), tl.float32)
        for c in range(0, K, BLOCK_K):
            if j0 < r0:
                base = inner(log, batch, h, H, t + r0, c, steps, K, 1, BLOCK_K)
                left = tl.exp(inner(log, batch, h, H, t + r0, c, steps, K, SUB, BLOCK_K) - base)
                right = tl.exp(base - inner(log, batch, h, H, t + j0, c, steps, K, SUB, BLOCK_K))
                right = tl.trans(tile(k + h * K, batch, t + j0, c, k_b, k_t, T, K, SUB, BLOCK_K).to(tl.float32) * right)
                rows = tile(k + h * K, batch, t + r0, c, k_b, k_t, T, K, SUB, BLOCK_K).to(tl.float32) * left
                keys = tl.dot(rows, right, keys, input_precision=PRECISION)
                rows = tile(q + h * K, batch, t + r0, c, q_b, q_t, T, K, SUB, BLOCK_K).to(tl.float32) * left
                queries = tl.dot(rows, right, queries, input_precision=PRECISION)
        if j0 != r0:
            columns = (j0 + tl.arange(0, SUB))[None, :]
            tl.store(keys_out[:, None] + columns, keys)
            tl.store(queries_out[:, None] + columns, queries)
    for i in range(SUB):
        keys = tl.zeros((SUB,), tl.float32)
        queries = tl.zeros((SUB,), tl.float32)
        for c in range(0, K, BLOCK_K):
            sums = inner(log, batch, h, H, t + r0, c, steps, K, SUB, BLOCK_K)
            gap = sums - inner(log, batch, h, H, t + r0 + i, c, steps, K, 1, BLOCK_K)
            column = tile(k + h * K, batch, t + r0 + i, c, k_b, k_t, T, K, 1, BLOCK_K).to(tl.float32)
            column = column * tl.exp(tl.where(r[:, None] >= i, gap, float("-inf")))
            keys += tl.sum(tile(k + h * K, batch, t + r0, c, k_b, k_t, T, K, SUB, BLOCK_K).to(tl.float32) * column, 1)
            queries += tl.sum(tile(q + h * K, batch, t + r0, c, q_b, q_t, T, K, SUB, BLOCK_K).to(tl.float32) * column, 1)
        tl.store(keys_out + (r0 + i), tl.where(r > i, keys, 0.0))
        tl.store(queries_out + (r0 + i), queries)


@triton.jit
def delta_invert(of_keys, betas, out, H, chunks, Q: tl.constexpr, BLOCK_J: tl.constexpr):
    """Columns of Y (b, h, c, q, q) by forward substitution, one row after the other; every thread owns columns."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    r = tl.arange(0, Q)[:, None]
    c = tl.program_id(2) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    scale = tl.load(slot(betas, batch * H + h, chunk, chunks, Q) + r)
    rows = slot(of_keys, batch * H + h, chunk, chunks, Q * Q)
    solved = tl.where(r == c, 1.0, 0.0)
    for t in range(1, Q):
        factors = tl.load(rows + (t * Q + r)) * scale  # zero from t on, as Akk is strictly lower
        solved = tl.where(r == t, solved - tl.sum(factors * solved, 0)[None, :], solved)
    tl.store(slot(out, batch * H + h, chunk, chunks, Q * Q) + (r * Q + c), solved)


@triton.jit
def delta_multiply(
    matrix, source, betas, log, out, source_b, source_h, source_t, T, H, K, C, chunks, TRANSPOSE: tl.constexpr,
    SCALE: tl.constexpr, DECAY: tl.constexpr, WIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out (b, h, t', C) = matrix (b, h, c, q, q), or its transpose, times the rows of source (b, h, t, C).

    SCALE multiplies source by β, DECAY by the decay from the chunk's start; betas and log may be None without.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C
    source += tl.cast(h, tl.int64) * source_h
    total = tl.zeros((Q, BLOCK_C), tl.float32)
    for j in range(0, Q, BLOCK_J):
        rows = tile(source, batch, chunk * Q + j, c, source_b, source_t, T, C, BLOCK_J, BLOCK_C).to(tl.float32)
        if SCALE:
            rows *= betas_of(betas, batch, h, H, chunk * Q + j, chunks * Q, BLOCK_J)[:, None]
        if DECAY:
            rows *= decays(log, batch, h, H, chunk, j, c, chunks, K, False, WIDE, Q, BLOCK_J, BLOCK_C)
        if TRANSPOSE:
            left = tl.trans(square(matrix, batch, h, H, chunk, chunks, j, 0, Q, BLOCK_J, Q))
        else:
            left = square(matrix, batch, h, H, chunk, chunks, 0, j, Q, Q, BLOCK_J)
        total = tl.dot(left.to(OPERAND), rows.to(OPERAND), total, input_precision=PRECISION)
    store_inner(out, total, batch, h, H, chunk * Q, c, chunks * Q, C, Q, BLOCK_C)


@triton.jit
def delta_outer(
    left, right, betas, log, left2, right2, out, left_b, left_t, right_b, right_h, right_t, right_T, left2_b, left2_t, out_b, T,
    H, K, C, chunks, END: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ_t decayed left[t, k] right[t, c] of each chunk into out (b, chunks, h, k, c).

    left: (b, t, h, k), decayed from the chunk's start (END: to its end). right: (b, h, t, c), times β for SCALE. Where there is
    left2 (b, t, h, k), decayed from the start, the same with right2 (b, h, t', c) is taken off.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    blocks = tl.cdiv(C, BLOCK_C)
    k = tl.program_id(2) // blocks * BLOCK_K
    c = tl.program_id(2) % blocks * BLOCK_C
    right += tl.cast(h, tl.int64) * right_h
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for j in range(0, Q, BLOCK_J):
        t = chunk * Q + j
        rows = tile(left + h * K, batch, t, k, left_b, left_t, T, K, BLOCK_J, BLOCK_K).to(tl.float32)
        rows *= decays(log, batch, h, H, chunk, j, k, chunks, K, END, WIDE, Q, BLOCK_J, BLOCK_K)
        if SCALE:
            rows *= betas_of(betas, batch, h, H, t, chunks * Q, BLOCK_J)[:, None]
        values = tile(right, batch, t, c, right_b, right_t, right_T, C, BLOCK_J, BLOCK_C).to(OPERAND)
        total = tl.dot(tl.trans(rows.to(OPERAND)), values, total, input_precision=PRECISION)
        if left2 is not None:
            rows = tile(left2 + h * K, batch, t, k, left2_b, left2_t, T, K, BLOCK_J, BLOCK_K).to(tl.float32)
            rows *= decays(log, batch, h, H, chunk, j, k, chunks, K, False, WIDE, Q, BLOCK_J, BLOCK_K)
            values = inner(right2, batch, h, H, t, c, chunks * Q, C, BLOCK_J, BLOCK_C).to(OPERAND)
            total = tl.dot(tl.trans((-rows).to(OPERAND)), values, total, input_precision=PRECISION)
    ks = k + tl.arange(0, BLOCK_K)[:, None]
    cs = c + tl.arange(0, BLOCK_C)[None, :]
    place = row(out, batch, chunk, out_b, H * K * C) + (h * K * C + ks * C + cs)
    tl.store(place, total.to(out.dtype.element_ty), mask=(ks < K) & (cs < C))


@triton.jit
def delta_join(
    log, moves, states, first, out, H, K, V, chunks, REVERSE: tl.constexpr, WIDE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Turn the chunks' own states (b, c + 1, h, k, v) into those between chunks: S' = Γ_end S - M S + own, moves (b, c, h, k, k).

    Forwards slot 0 becomes `first` (zeros when None), slot c + 1 follows slot c; REVERSE starts with slot `chunks` and uses Mᵀ.
    A program owns a block of value channels and walks the chunks; the states pass through memory, visible after each barrier.
    """
    batch = tl.program_id(0)
    h = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V
    vs = v + tl.arange(0, BLOCK_V)[None, :]
    slots = chunks + 1
    start = chunks if REVERSE else 0
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)[:, None]
        held = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        if first is not None:
            held += state_block(first, batch, 0, h, k, v, H, K, V, 1, BLOCK_K, BLOCK_V)
        place = slot(states, batch * slots + start, h, H, K * V) + (ks * V + vs)
        tl.store(place, held, mask=(ks < K) & (vs < V))
    for i in range(chunks):
        tl.debug_barrier()
        chunk = chunks - 1 - i if REVERSE else i
        before = chunk + 1 if REVERSE else chunk
        after = chunk if REVERSE else chunk + 1
        matrix = slot(moves, batch * chunks + chunk, h, H, K * K)
        for k in range(0, K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)[:, None]
            total = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            for j in range(0, K, BLOCK_J):
                js = j + tl.arange(0, BLOCK_J)[None, :]
                offsets = js * K + ks if REVERSE else ks * K + js
                step = tl.load(matrix + offsets, mask=(ks < K) & (js < K), other=0.0).to(OPERAND)
                held = state_block(states, batch, before, h, j, v, H, K, V, slots, BLOCK_J, BLOCK_V).to(OPERAND)
                total = tl.dot(step, held, total, input_precision=PRECISION)
            held = state_block(states, batch, before, h, k, v, H, K, V, slots, BLOCK_K, BLOCK_V)
            held *= whole_decay(log, batch, h, H, chunk, k, chunks, K, WIDE, Q, BLOCK_K)
            held += state_block(states, batch, after, h, k, v, H, K, V, slots, BLOCK_K, BLOCK_V) - total
            tl.store(slot(states, batch * slots + after, h, H, K * V) + (ks * V + vs), held, mask=(ks < K) & (vs < V))
            if out is not None:  # noqa: SIM102 - the outer one is decided while compiling
                if i == chunks - 1:
                    tl.store(slot(out, batch, h, H, K * V) + (ks * V + vs), held, mask=(ks < K) & (vs < V))


@triton.jit
def delta_outputs(
    q, log, betas, of_queries, solved, moved, states, y, q_b, q_t, T, H, K, V, chunks, WIDE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """y (b, t, h, v) from the states before each chunk; solved = Y V (b, h, t', v), moved = Y K̂ (b, h, t', k)."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V
    t = chunk * Q
    total = tl.zeros((Q, BLOCK_V), tl.float32)
    for k in range(0, K, BLOCK_K):
        rows = tile(q + h * K, batch, t, k, q_b, q_t, T, K, Q, BLOCK_K).to(tl.float32)
        rows *= decays(log, batch, h, H, chunk, 0, k, chunks, K, False, WIDE, Q, Q, BLOCK_K)
        held = state_block(states, batch, chunk, h, k, v, H, K, V, chunks + 1, BLOCK_K, BLOCK_V).to(OPERAND)
        total = tl.dot(rows.to(OPERAND), held, total, input_precision=PRECISION)
    for j in range(0, Q, BLOCK_J):
        written = written_rows(
            betas, solved, moved, states, batch, h, chunk, j, v, H, K, V, chunks, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_K, BLOCK_V
        )  # fmt: skip
        written *= betas_of(betas, batch, h, H, t + j, chunks * Q, BLOCK_J)[:, None]
        left = square(of_queries, batch, h, H, chunk, chunks, 0, j, Q, Q, BLOCK_J).to(OPERAND)
        total = tl.dot(left, written.to(OPERAND), total, input_precision=PRECISION)
    r = tl.arange(0, Q)[:, None]
    vs = v + tl.arange(0, BLOCK_V)[None, :]
    place = slot(y + h * V, batch, t, T, H * V) + (r * (H * V) + vs)
    tl.store(place, total.to(y.dtype.element_ty), mask=(t + r < T) & (vs < V))
