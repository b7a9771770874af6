"""Pieces that the kernels of the gated delta rule share: tiles of what lies as (b, h, t', …) or (b, h, c, …), and decays.

Legend: b batch, t time, c chunk, q (and j) steps of a chunk, h heads, k key channels, v value channels; t' is time padded to
whole chunks.
"""

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import slot


@triton.jit
def inner(p, batch, h, H, t, column, steps, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) of (b, h, t', size) from step t and column `column` on; t' has `steps` steps."""
    r = tl.arange(0, ROWS)[:, None]
    c = column + tl.arange(0, COLUMNS)[None, :]
    return tl.load(slot(p, batch * H + h, t, steps, size) + (r * size + c), mask=(c < size) & (r >= 0), other=0.0)


@triton.jit
def store_inner(p, value, batch, h, H, t, column, steps, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)[:, None]
    c = column + tl.arange(0, COLUMNS)[None, :]
    tl.store(slot(p, batch * H + h, t, steps, size) + (r * size + c), value.to(p.dtype.element_ty), mask=(c < size) & (r >= 0))


@triton.jit
def square(p, batch, h, H, chunk, chunks, r0, c0, Q: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) of a chunk's matrix in (b, h, c, q, q) from row r0 and column c0 on."""
    offsets = (r0 + tl.arange(0, ROWS))[:, None] * Q + (c0 + tl.arange(0, COLUMNS))[None, :]
    return tl.load(slot(p, batch * H + h, chunk, chunks, Q * Q) + offsets)


@triton.jit
def betas_of(betas, batch, h, H, t, steps, COUNT: tl.constexpr):
    return tl.load(slot(betas, batch * H + h, t, steps, 1) + tl.arange(0, COUNT))


@triton.jit
def whole_decay(log, batch, h, H, chunk, k, chunks, K, WIDE: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Decay over a chunk: (BLOCK_K, 1) for a decay per channel, else (1, 1)."""
    if WIDE:
        ks = k + tl.arange(0, BLOCK_K)[:, None]
        last = tl.load(slot(log, batch * H + h, chunk, chunks, Q * K) + ((Q - 1) * K + ks), mask=ks < K, other=0.0)
    else:
        last = tl.load(slot(log, batch * H + h, chunk, chunks, Q) + (Q - 1) + tl.arange(0, 1)[:, None])
    return tl.exp(last.to(tl.float32))


@triton.jit
def decays(
    log, batch, h, H, chunk, j, k, chunks, K, END: tl.constexpr, WIDE: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Decay from the chunk's start to steps j … (END: from them to its end), (ROWS, BLOCK_K), or (ROWS, 1) for one per head."""
    if WIDE:
        sums = inner(log, batch, h, H, chunk * Q + j, k, chunks * Q, K, ROWS, BLOCK_K)
        if END:
            ks = k + tl.arange(0, BLOCK_K)[None, :]
            place = slot(log, batch * H + h, chunk, chunks, Q * K) + ((Q - 1) * K + ks)
            sums = tl.load(place, mask=ks < K, other=0.0) - sums
    else:
        place = slot(log, batch * H + h, chunk, chunks, Q)
        sums = tl.load(place + (j + tl.arange(0, ROWS))[:, None])
        if END:
            sums = tl.load(place + (Q - 1)) - sums
    return tl.exp(sums.to(tl.float32))


@triton.jit
def store_square(p, value, batch, h, H, chunk, chunks, c0, Q: tl.constexpr, COLUMNS: tl.constexpr):
    offsets = tl.arange(0, Q)[:, None] * Q + (c0 + tl.arange(0, COLUMNS))[None, :]
    tl.store(slot(p, batch * H + h, chunk, chunks, Q * Q) + offsets, value)


@triton.jit
def state_block(p, batch, index, h, k, v, H, K, V, slots, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """(BLOCK_K, BLOCK_V) of the state in a slot of (b, slots, h, k, v)."""
    ks = k + tl.arange(0, BLOCK_K)[:, None]
    vs = v + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(slot(p, batch * slots + index, h, H, K * V) + (ks * V + vs), mask=(ks < K) & (vs < V), other=0.0)


@triton.jit
def written_rows(
    betas, solved, moved, states, batch, h, chunk, j, v, H, K, V, chunks, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    Q: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows j … of P = Y V - (Y K̂) S, (ROWS, BLOCK_V)."""
    taken = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = inner(moved, batch, h, H, chunk * Q + j, k, chunks * Q, K, ROWS, BLOCK_K).to(OPERAND)
        held = state_block(states, batch, chunk, h, k, v, H, K, V, chunks + 1, BLOCK_K, BLOCK_V).to(OPERAND)
        taken = tl.dot(left, held, taken, input_precision=PRECISION)
    return inner(solved, batch, h, H, chunk * Q + j, v, chunks * Q, V, ROWS, BLOCK_V) - taken
