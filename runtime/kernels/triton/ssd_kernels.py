"""Kernels of SSD's forward (Dao and Gu 2024): one program per chunk of Q steps and head, as matrix products on tensor cores.

`ssd_steps` prepares step sizes and sums of log decays, `ssd_local` gives each chunk's end state from zero, `ssd_join` turns these
into the states between chunks, in place, and `ssd_outputs` adds what a chunk's own steps and the state before it contribute.

Sums of log decays are float64: their differences are exponents. Products run in OPERAND (bfloat16 for bfloat16 inputs, else
float32, with PRECISION "ieee" or "tf32") and add up in float32. The (Q, Q) matrix of a chunk is made in slices of BLOCK_J
columns: exact float32 products keep whole rows of their operands in registers, so there the slices are narrow.

Bytes of `ssd_outputs`: x, z, y and the states before each chunk once, B and C once per head (heads of a group share them in L2).
Of `ssd_local`: x and B likewise, one state per chunk. `ssd_join`: every state read and written once. Each is its own minimum.

Legend: b batch, t time, c chunk, q (and j) steps of a chunk, h heads, p channels of a head, g groups, n states; t' is time padded
to whole chunks.
"""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import load_rows, row, silu, slot, softplus


@triton.jit
def ssd_steps(
    dt, A, bias, delta, log, low, high, dt_b, dt_t, T, H, chunks, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """δ (b, h, t') in float32, 0 from T on, and the sum of δ A from the chunk's start up to each step (b, h, t') in float64.

    The mask comes after softplus (softplus(0) is not 0) and before any exponential.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    q = tl.arange(0, Q)[:, None]
    inside = (chunk * Q + q < T) & (h < H)
    value = tl.load(row(dt, batch, chunk * Q, dt_b, dt_t) + (q * dt_t + h), mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + h, mask=h < H, other=0.0)
    if SOFTPLUS:
        value = softplus(value)
    if LIMITED:
        value = tl.minimum(tl.maximum(value, low), high)
    value = tl.where(inside, value, 0.0)
    sums = tl.cumsum(value.to(tl.float64) * tl.load(A + h, mask=h < H, other=0.0).to(tl.float64), 0)
    tl.store(slot(delta, batch * H + h, chunk, chunks, Q) + q, value, mask=h < H)
    tl.store(slot(log, batch * H + h, chunk, chunks, Q) + q, sums, mask=h < H)


@triton.jit
def steps(p, batch, chunk, h, H, chunks, first, Q: tl.constexpr, COUNT: tl.constexpr):
    """COUNT values of (b, h, t') from step `first` of a chunk on."""
    return tl.load(slot(p, batch * H + h, chunk, chunks, Q) + first + tl.arange(0, COUNT))


@triton.jit
def since_start(log, batch, chunk, h, H, chunks, Q: tl.constexpr):
    """Decay from the chunk's start to each step (q)."""
    return tl.exp(steps(log, batch, chunk, h, H, chunks, 0, Q, Q).to(tl.float32))


@triton.jit
def until_end(log, batch, chunk, h, H, chunks, Q: tl.constexpr):
    """Decay from each step to the chunk's end (q)."""
    whole = tl.load(slot(log, batch * H + h, chunk, chunks, Q) + (Q - 1))
    return tl.exp((whole - steps(log, batch, chunk, h, H, chunks, 0, Q, Q)).to(tl.float32))


@triton.jit
def tile(p, batch, t, column, b_stride, t_stride, T, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) of (b, t, size) from step t and column `column` on; p points to the head or group."""
    r = tl.arange(0, ROWS)[:, None]
    c = column + tl.arange(0, COLUMNS)[None, :]
    offsets = r * t_stride + c  # in 32 bits: `timed` keeps strides of time below 2^24
    return tl.load(row(p, batch, t, b_stride, t_stride) + offsets, mask=(t + r < T) & (c < size), other=0.0)


@triton.jit
def store_tile(p, value, batch, t, column, T, width, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write (ROWS, COLUMNS) into a contiguous (b, t, width), p pointing to the head or group of `size` columns."""
    r = tl.arange(0, ROWS)[:, None]
    c = column + tl.arange(0, COLUMNS)[None, :]
    place = slot(p, batch, t, T, width) + (r * width + c)
    tl.store(place, value.to(p.dtype.element_ty), mask=(t + r < T) & (c < size))


@triton.jit
def state_tile(p, batch, chunk, h, p0, n0, H, P, N, slots, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_P, BLOCK_N) of the state in slot `chunk` of (b, slots, h, p, n)."""
    ps = p0 + tl.arange(0, BLOCK_P)[:, None]
    ns = n0 + tl.arange(0, BLOCK_N)[None, :]
    return tl.load(slot(p, batch * slots + chunk, h, H, P * N) + (ps * N + ns), mask=(ps < P) & (ns < N), other=0.0)


@triton.jit
def decay_slice(log, batch, chunk, h, j, H, chunks, BACK: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr):
    """Decays between all steps r and steps j … of a chunk, (Q, BLOCK_J), in float32: from j to r (BACK: r to j), 0 for r < j.

    The mask comes before the exponential.
    """
    ahead = tl.arange(0, Q)[:, None] - (j + tl.arange(0, BLOCK_J))[None, :]
    rows = steps(log, batch, chunk, h, H, chunks, 0, Q, Q)
    columns = steps(log, batch, chunk, h, H, chunks, j, Q, BLOCK_J)
    gap = (rows[:, None] - columns[None, :]).to(tl.float32)
    if BACK:
        ahead = -ahead
        gap = -gap
    return tl.exp(tl.where(ahead >= 0, gap, float("-inf")))


@triton.jit
def products(
    rows, columns, batch, t, j, r_b, r_t, c_b, c_t, T, size, OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(Q, BLOCK_J): rows t … t+Q-1 of one tensor times rows t+j … of another, over `size` columns in blocks."""
    out = tl.zeros((Q, BLOCK_J), tl.float32)
    for first in range(0, size, BLOCK):
        left = tile(rows, batch, t, first, r_b, r_t, T, size, Q, BLOCK).to(OPERAND)
        right = tile(columns, batch, t + j, first, c_b, c_t, T, size, BLOCK_J, BLOCK).to(OPERAND)
        out = tl.dot(left, tl.trans(right), out, input_precision=PRECISION)
    return out


@triton.jit
def ssd_local(
    x, B, z, delta, log, ends, x_b, x_t, B_b, B_t, z_b, z_t, T, H, P, N, per_group, chunks, REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ_q weight[q] x[q, p] B[q, n] of each chunk, into slot c + 1 of ends (b, chunks + 1, h, p, n).

    The weight is δ times the decay from q to the end of the chunk. REVERSE: x is dy (gated by z), B is C, the weight the decay
    from the chunk's start to q, and the slot is c.
    """
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    blocks = tl.cdiv(N, BLOCK_N)
    p = tl.program_id(2) // blocks * BLOCK_P
    n = tl.program_id(2) % blocks * BLOCK_N
    whole = tl.load(slot(log, batch * H + h, chunk, chunks, Q) + (Q - 1))
    end = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for j in range(0, Q, BLOCK_J):
        t = chunk * Q + j
        values = tile(x + h * P, batch, t, p, x_b, x_t, T, P, BLOCK_J, BLOCK_P).to(tl.float32)
        sums = steps(log, batch, chunk, h, H, chunks, j, Q, BLOCK_J)
        if REVERSE:
            weight = tl.exp(sums.to(tl.float32))
            if z is not None:
                values *= silu(tile(z + h * P, batch, t, p, z_b, z_t, T, P, BLOCK_J, BLOCK_P).to(tl.float32))
        else:
            weight = steps(delta, batch, chunk, h, H, chunks, j, Q, BLOCK_J) * tl.exp((whole - sums).to(tl.float32))
        keys = tile(B + h // per_group * N, batch, t, n, B_b, B_t, T, N, BLOCK_J, BLOCK_N).to(OPERAND)
        end = tl.dot(tl.trans((values * weight[:, None]).to(OPERAND)), keys, end, input_precision=PRECISION)
    ps = p + tl.arange(0, BLOCK_P)[:, None]
    ns = n + tl.arange(0, BLOCK_N)[None, :]
    place = slot(ends, batch * (chunks + 1) + chunk + (0 if REVERSE else 1), h, H, P * N)
    tl.store(place + (ps * N + ns), end, mask=(ps < P) & (ns < N))


@triton.jit
def ssd_join(
    log, states, first, out, H, size, chunks, REVERSE: tl.constexpr, Q: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the chunks' own states (b, c + 1, h, size) into those between chunks, in place; the last one also goes to `out`.

    Forwards slot 0 becomes `first` (zeros when None) and slot c + 1 adds the decayed slot c; REVERSE starts with slot `chunks`.
    """
    batch = tl.program_id(0)
    h = tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    held = tl.zeros((BLOCK,), tl.float32)
    if first is not None:
        held += tl.load(slot(first, batch, h, H, size) + i, mask=i < size, other=0.0)
    states = slot(states, batch * (chunks + 1), h, H, size)
    tl.store(slot(states, chunks if REVERSE else 0, 0, H, size) + i, held, mask=i < size)
    rounds = tl.cdiv(chunks, UNROLL)
    for k in range(rounds):
        c = (rounds - 1 - k if REVERSE else k) * UNROLL
        limit = tl.where(i < size, chunks - c, 0)
        place = slot(states, c + (0 if REVERSE else 1), 0, H, size)
        owns = load_rows(place, tl.cast(H, tl.int64) * size, i, limit, 0.0, UNROLL)
        for j in tl.static_range(UNROLL - 1 if REVERSE else 0, -1 if REVERSE else UNROLL, -1 if REVERSE else 1):
            decay = tl.load(slot(log, batch * H + h, c + j, chunks, Q) + (Q - 1), mask=c + j < chunks, other=0.0)
            held = tl.exp(decay.to(tl.float32)) * held + owns[j]
            tl.store(slot(place, j, 0, H, size) + i, held, mask=j < limit)
    if out is not None:
        tl.store(slot(out, batch, h, H, size) + i, held, mask=i < size)


@triton.jit
def before_gate(
    x, B, C, skip, delta, log, states, batch, chunk, h, p, x_b, x_t, B_b, B_t, C_b, C_t, T, H, P, N, per_group, chunks,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a chunk's outputs get from the state before it, and from that, its own steps and the skip; both (Q, BLOCK_P)."""
    t = chunk * Q
    keys = B + h // per_group * N
    queries = C + h // per_group * N
    from_state = tl.zeros((Q, BLOCK_P), tl.float32)
    for n in range(0, N, BLOCK_N):
        left = tile(queries, batch, t, n, C_b, C_t, T, N, Q, BLOCK_N).to(OPERAND)
        held = state_tile(states, batch, chunk, h, p, n, H, P, N, chunks + 1, BLOCK_P, BLOCK_N).to(OPERAND)
        from_state = tl.dot(left, tl.trans(held), from_state, input_precision=PRECISION)
    from_state *= since_start(log, batch, chunk, h, H, chunks, Q)[:, None]
    out = from_state
    for j in range(0, Q, BLOCK_J):
        mix = products(queries, keys, batch, t, j, C_b, C_t, B_b, B_t, T, N, OPERAND, PRECISION, Q, BLOCK_J, BLOCK_N)
        mix = (mix * decay_slice(log, batch, chunk, h, j, H, chunks, False, Q, BLOCK_J)).to(OPERAND)
        inputs = tile(x + h * P, batch, t + j, p, x_b, x_t, T, P, BLOCK_J, BLOCK_P).to(tl.float32)
        inputs = (inputs * steps(delta, batch, chunk, h, H, chunks, j, Q, BLOCK_J)[:, None]).to(OPERAND)
        out = tl.dot(mix, inputs, out, input_precision=PRECISION)
    if skip is not None:
        out += tile(x + h * P, batch, t, p, x_b, x_t, T, P, Q, BLOCK_P).to(tl.float32) * tl.load(skip + h)
    return from_state, out


@triton.jit
def ssd_outputs(
    x, B, C, skip, z, delta, log, states, y, x_b, x_t, B_b, B_t, C_b, C_t, z_b, z_t, T, H, P, N, per_group, chunks,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y (b, t, h, p) from the states before each chunk, states (b, c + 1, h, p, n)."""
    pid = tl.program_id(0)
    batch, chunk = pid // chunks, pid % chunks
    h = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P
    _, out = before_gate(
        x, B, C, skip, delta, log, states, batch, chunk, h, p, x_b, x_t, B_b, B_t, C_b, C_t, T, H, P, N, per_group, chunks,
        OPERAND, PRECISION, Q, BLOCK_J, BLOCK_P, BLOCK_N,
    )  # fmt: skip
    if z is not None:
        out *= silu(tile(z + h * P, batch, chunk * Q, p, z_b, z_t, T, P, Q, BLOCK_P).to(tl.float32))
    store_tile(y + h * P, out, batch, chunk * Q, p, T, H * P, P, Q, BLOCK_P)
