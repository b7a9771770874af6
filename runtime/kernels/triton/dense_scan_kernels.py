"""Kernels of the scan with a full matrix per step, for few states, real or complex (as two reals), over segments of time.

`summary` pushes blocks of columns of the identity, and the inputs alone, through a segment: its product of matrices and its end
state from zero. `join` walks the segments, `outputs` and `vjp` start each from the state that enters it. The adjoint steps with
Aᴴ: what a step hands to the one before it is μ = Aᴴ λ.

Bytes: `outputs` and `vjp` read A once, which dwarfs all else; `summary` reads it once per block of columns, from L2.

Legend: b batch, t time, s segments, i (and k) states, c real and imaginary part, m columns.
"""

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import row, slot


@triton.jit
def load_complex(p, offsets, mask, COMPLEX: tl.constexpr):
    """Real and imaginary part at `offsets` (the latter the former again where numbers are real); masked ones are 0."""
    if COMPLEX:
        re = tl.load(p + 2 * offsets, mask=mask, other=0.0).to(tl.float32)
        im = tl.load(p + 2 * offsets + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        re = tl.load(p + offsets, mask=mask, other=0.0).to(tl.float32)
        im = re
    return re, im


@triton.jit
def store_complex(p, offsets, re, im, mask, COMPLEX: tl.constexpr):
    if COMPLEX:
        tl.store(p + 2 * offsets, re.to(p.dtype.element_ty), mask=mask)
        tl.store(p + 2 * offsets + 1, im.to(p.dtype.element_ty), mask=mask)
    else:
        tl.store(p + offsets, re.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(p, N, COMPLEX: tl.constexpr, BLOCK_N: tl.constexpr):
    """(i, k) of a contiguous (N, N)."""
    i = tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_N)[None, :]
    return load_complex(p, i * N + k, (i < N) & (k < N), COMPLEX)


@triton.jit
def multiply(ar, ai, hr, hi, ADJOINT: tl.constexpr, COMPLEX: tl.constexpr):
    """A h, or Aᴴ h for ADJOINT; A: (i, k), h: (k, m)."""
    if ADJOINT:
        ar = tl.trans(ar)
        ai = -tl.trans(ai)
    re = tl.sum(ar[:, :, None] * hr[None, :, :], 1)
    im = re
    if COMPLEX:
        im = tl.sum(ar[:, :, None] * hi[None, :, :] + ai[:, :, None] * hr[None, :, :], 1)
        re -= tl.sum(ai[:, :, None] * hi[None, :, :], 1)
    return re, im


@triton.jit
def dense_scan_summary(
    A, b, ends, A_b, A_t, b_b, b_t, T, N, segment, count, REVERSE: tl.constexpr, COMPLEX: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Into ends (b, s, m, i): where column m < N of the identity ends after each segment, and for m = N zeros with inputs b.

    REVERSE walks back in time with Aᴴ and b = dh (None for zeros), and gives what leaves the segment at its start.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    i = tl.arange(0, BLOCK_N)[:, None]
    start = s * segment
    steps = tl.minimum(segment, T - start)
    width: tl.constexpr = 2 if COMPLEX else 1
    hr = tl.where((i == m) & (m < N), 1.0, 0.0)
    hi = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    for k in range(steps):
        t = start + (steps - 1 - k if REVERSE else k)
        ar, ai = load_matrix(row(A, batch, t, A_b, A_t), N, COMPLEX, BLOCK_N)
        if not REVERSE:
            hr, hi = multiply(ar, ai, hr, hi, False, COMPLEX)
        if b is not None:
            br, bi = load_complex(row(b, batch, t, b_b, b_t), i + 0 * m, (i < N) & (m == N), COMPLEX)
            hr += br
            hi += bi
        if REVERSE:
            hr, hi = multiply(ar, ai, hr, hi, True, COMPLEX)
    place = slot(ends, batch, s, count, (N + 1) * N * width)
    store_complex(place, m * N + i, hr, hi, (i < N) & (m <= N), COMPLEX)


@triton.jit
def dense_scan_join(
    ends, first, entry, out, N, count, REVERSE: tl.constexpr, COMPLEX: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """States between segments: entry (b, s, i) is what enters each, out (b, m, i) what leaves the last, from first (b, m, i).

    Grid axis 1 goes over m, the columns of `first`; entry belongs to m = 0. Each may be None (first: zeros).
    """
    batch = tl.program_id(0)
    m = tl.program_id(1)
    i = tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_N)[None, :]
    width: tl.constexpr = 2 if COMPLEX else 1
    hr = tl.zeros((BLOCK_N, 1), tl.float32)
    hi = hr
    if first is not None:
        hr, hi = load_complex(slot(first, batch, m, tl.num_programs(1), N * width), i, i < N, COMPLEX)
    for j in range(count):
        s = count - 1 - j if REVERSE else j
        if entry is not None:
            store_complex(slot(entry, batch, s, count, N * width), i, hr, hi, i < N, COMPLEX)
        place = slot(ends, batch, s, count, (N + 1) * N * width)
        pr, pi = load_complex(place, k * N + i, (i < N) & (k < N), COMPLEX)  # columns are stored one after the other
        er, ei = load_complex(place, N * N + i, i < N, COMPLEX)
        hr, hi = multiply(pr, pi, hr, hi, False, COMPLEX)
        hr += er
        hi += ei
    if out is not None:
        store_complex(slot(out, batch, m, tl.num_programs(1), N * width), i, hr, hi, i < N, COMPLEX)


@triton.jit
def dense_scan_outputs(
    A, b, entry, h, last, A_b, A_t, b_b, b_t, T, N, segment, count, COMPLEX: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """h (b, t, i) and last (b, i) from the states that enter each segment, entry (b, s, i) or None for zeros."""
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    i = tl.arange(0, BLOCK_N)[:, None]
    width: tl.constexpr = 2 if COMPLEX else 1
    start = s * segment
    hr = tl.zeros((BLOCK_N, 1), tl.float32)
    hi = hr
    if entry is not None:
        hr, hi = load_complex(slot(entry, batch, s, count, N * width), i, i < N, COMPLEX)
    for t in range(start, tl.minimum(start + segment, T)):
        ar, ai = load_matrix(row(A, batch, t, A_b, A_t), N, COMPLEX, BLOCK_N)
        br, bi = load_complex(row(b, batch, t, b_b, b_t), i, i < N, COMPLEX)
        hr, hi = multiply(ar, ai, hr, hi, False, COMPLEX)
        hr += br
        hi += bi
        store_complex(slot(h, batch, t, T, N * width), i, hr, hi, i < N, COMPLEX)
    if s == count - 1:
        store_complex(slot(last, batch, 0, 1, N * width), i, hr, hi, i < N, COMPLEX)


@triton.jit
def dense_scan_vjp(
    dh, A, h, h0, entry, dA, db, dh0, dh_b, dh_t, A_b, A_t, h_b, h_t, T, N, segment, count, COMPLEX: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dA (b, t, i, k), db (b, t, i), dh0 (b, i) from the μ that enters each segment at its end, entry (b, s, i), None for zeros.

    Any of dh, h0, dA, db, dh0 may be None.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    i = tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_N)[None, :]
    width: tl.constexpr = 2 if COMPLEX else 1
    start = s * segment
    steps = tl.minimum(segment, T - start)
    lr = tl.zeros((BLOCK_N, 1), tl.float32)
    li = lr
    if entry is not None:
        lr, li = load_complex(slot(entry, batch, s, count, N * width), i, i < N, COMPLEX)
    for j in range(steps):
        t = start + (steps - 1 - j)
        if dh is not None:
            dr, di = load_complex(row(dh, batch, t, dh_b, dh_t), i, i < N, COMPLEX)
            lr += dr
            li += di
        if db is not None:
            store_complex(slot(db, batch, t, T, N * width), i, lr, li, i < N, COMPLEX)
        if dA is not None:
            kr, ki = load_complex(row(h, batch, t - 1, h_b, h_t), k, tl.where(k < N, t, 0) > 0, COMPLEX)
            if h0 is not None:
                fr, fi = load_complex(slot(h0, batch, 0, 1, N * width), k, tl.where(k < N, t, 1) == 0, COMPLEX)
                kr += fr
                ki += fi
            gr = lr * kr
            gi = gr
            if COMPLEX:
                gi = li * kr - lr * ki
                gr += li * ki
            store_complex(slot(dA, batch, t, T, N * N * width), i * N + k, gr, gi, (i < N) & (k < N), COMPLEX)
        ar, ai = load_matrix(row(A, batch, t, A_b, A_t), N, COMPLEX, BLOCK_N)
        lr, li = multiply(ar, ai, lr, li, True, COMPLEX)
    if dh0 is not None:  # noqa: SIM102 - the outer one is decided while compiling
        if s == 0:
            store_complex(slot(dh0, batch, 0, 1, N * width), i, lr, li, i < N, COMPLEX)
