"""Kernels of the elementwise scan, real or complex (as two reals), in three steps over segments of time.

`summary` gives each segment's product of decays and its end state from zero, `join` walks the few segments, `outputs` starts each
segment from the state that enters it. The same three run backwards for the adjoint λ[t] = dh[t] + conj(a[t+1]) λ[t+1]: what a
segment hands to the one before it is μ = conj(a[t]) λ[t].

Every kernel reads each of its inputs once and writes each output once; beside them it moves two rows of states per segment of
at least 16 steps, so bytes moved are at most 1.125 times the kernel's minimum. With more than one segment the second read of the
inputs comes from L2 as far as a chunk's inputs fit there.

Legend: b batch, t time, d channels (all inner dimensions), c real and imaginary part, s segments.
"""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl

from adjcomp.runtime.kernels.triton.functions import row, slot


@triton.jit
def load_number(p, d, mask, other: tl.constexpr, COMPLEX: tl.constexpr):
    """Real and imaginary part at d (the latter the former again where numbers are real); masked ones are `other`."""
    if COMPLEX:
        part = tl.arange(0, 2)[None, :]
        pair = tl.load(p + (2 * d[:, None] + part), mask=mask[:, None], other=0.0).to(tl.float32)
        re, im = tl.split(pair)
        re = tl.where(mask, re, other)
    else:
        re = tl.load(p + d, mask=mask, other=other).to(tl.float32)
        im = re
    return re, im


@triton.jit
def store_number(p, d, re, im, mask, COMPLEX: tl.constexpr):
    if COMPLEX:
        part = tl.arange(0, 2)[None, :]
        tl.store(p + (2 * d[:, None] + part), tl.join(re, im).to(p.dtype.element_ty), mask=mask[:, None])
    else:
        tl.store(p + d, re.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(p, stride, d, limit, other: tl.constexpr, COMPLEX: tl.constexpr, U: tl.constexpr):
    """U rows as tuples of real and imaginary parts; row i is `other` where i >= limit."""
    re, im = load_number(p, d, limit > 0, other, COMPLEX)
    res = (re,)
    ims = (im,)
    for i in tl.static_range(1, U):
        p += stride
        re, im = load_number(p, d, i < limit, other, COMPLEX)
        res = res + (re,)
        ims = ims + (im,)
    return res, ims


@triton.jit
def multiply_add(ar, ai, hr, hi, br, bi, COMPLEX: tl.constexpr):
    """a h + b."""
    if COMPLEX:
        re = ar * hr - ai * hi + br
        im = ar * hi + ai * hr + bi
    else:
        re = ar * hr + br
        im = re
    return re, im


@triton.jit
def linear_scan_summary(
    a, b, decay, end, a_b, a_t, b_b, b_t, T, D, segment, count, REVERSE: tl.constexpr, COMPLEX: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Product of decays and local end state of each segment: a, b (b, t, d, c) -> decay, end (b, s, d, c).

    REVERSE walks back in time with conj(a) and b = dh (None for zeros), and gives what leaves the segment at its start.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    start = s * segment
    steps = tl.minimum(segment, T - start)
    hr = tl.zeros((BLOCK_D,), tl.float32)
    hi = hr
    pr = hr + 1.0
    pi = hr
    for k in range(tl.cdiv(steps, UNROLL)):
        t = start + (tl.cdiv(steps, UNROLL) - 1 - k if REVERSE else k) * UNROLL
        limit = tl.where(mask, start + steps - t, 0)
        ars, ais = load_numbers(row(a, batch, t, a_b, a_t), a_t, d, limit, 1.0, COMPLEX, UNROLL)
        if b is not None:
            brs, bis = load_numbers(row(b, batch, t, b_b, b_t), b_t, d, limit, 0.0, COMPLEX, UNROLL)
        for i in tl.static_range(UNROLL - 1 if REVERSE else 0, -1 if REVERSE else UNROLL, -1 if REVERSE else 1):
            if REVERSE:
                if b is not None:
                    hr, hi = multiply_add(ars[i], -ais[i], hr + brs[i], hi + bis[i], 0.0, 0.0, COMPLEX)
                pr, pi = multiply_add(ars[i], -ais[i], pr, pi, 0.0, 0.0, COMPLEX)
            else:
                hr, hi = multiply_add(ars[i], ais[i], hr, hi, brs[i], bis[i], COMPLEX)
                pr, pi = multiply_add(ars[i], ais[i], pr, pi, 0.0, 0.0, COMPLEX)
    width: tl.constexpr = 2 if COMPLEX else 1
    store_number(slot(decay, batch, s, count, D * width), d, pr, pi, mask, COMPLEX)
    store_number(slot(end, batch, s, count, D * width), d, hr, hi, mask, COMPLEX)


@triton.jit
def linear_scan_join(
    decay, end, first, entry, out, D, count, REVERSE: tl.constexpr, COMPLEX: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State entering each segment, entry (b, s, d, c), and what leaves the last of them, out (b, d, c); `first` may be None.

    decay, end: (b, s, d, c). The state enters segment 0 (REVERSE: the last one) as `first`, zeros when None.
    """
    batch = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    width: tl.constexpr = 2 if COMPLEX else 1
    size = D * width
    hr = tl.zeros((BLOCK_D,), tl.float32)
    hi = hr
    if first is not None:
        hr, hi = load_number(slot(first, batch, 0, 1, size), d, mask, 0.0, COMPLEX)
    for k in range(tl.cdiv(count, UNROLL)):
        s = (tl.cdiv(count, UNROLL) - 1 - k if REVERSE else k) * UNROLL
        limit = tl.where(mask, count - s, 0)
        prs, pis = load_numbers(slot(decay, batch, s, count, size), size, d, limit, 1.0, COMPLEX, UNROLL)
        ers, eis = load_numbers(slot(end, batch, s, count, size), size, d, limit, 0.0, COMPLEX, UNROLL)
        for i in tl.static_range(UNROLL - 1 if REVERSE else 0, -1 if REVERSE else UNROLL, -1 if REVERSE else 1):
            if entry is not None:
                store_number(slot(entry, batch, s + i, count, size), d, hr, hi, i < limit, COMPLEX)
            hr, hi = multiply_add(prs[i], pis[i], hr, hi, ers[i], eis[i], COMPLEX)
    if out is not None:
        store_number(slot(out, batch, 0, 1, size), d, hr, hi, mask, COMPLEX)


@triton.jit
def linear_scan_outputs(
    a, b, entry, h, last, a_b, a_t, b_b, b_t, T, D, segment, count, COMPLEX: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """h (b, t, d, c) and last (b, d, c) from the states that enter each segment, entry (b, s, d, c) or None for zeros.

    Bytes: a, b, h once each.
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    width: tl.constexpr = 2 if COMPLEX else 1
    start = s * segment
    steps = tl.minimum(segment, T - start)
    size = D * width
    hr = tl.zeros((BLOCK_D,), tl.float32)
    hi = hr
    if entry is not None:
        hr, hi = load_number(slot(entry, batch, s, count, size), d, mask, 0.0, COMPLEX)
    for t in range(start, start + steps, UNROLL):
        limit = tl.where(mask, start + steps - t, 0)
        ars, ais = load_numbers(row(a, batch, t, a_b, a_t), a_t, d, limit, 1.0, COMPLEX, UNROLL)
        brs, bis = load_numbers(row(b, batch, t, b_b, b_t), b_t, d, limit, 0.0, COMPLEX, UNROLL)
        for i in tl.static_range(UNROLL):
            hr, hi = multiply_add(ars[i], ais[i], hr, hi, brs[i], bis[i], COMPLEX)
            store_number(slot(h, batch, t + i, T, size), d, hr, hi, i < limit, COMPLEX)
    if s == count - 1:
        store_number(slot(last, batch, 0, 1, size), d, hr, hi, mask, COMPLEX)


@triton.jit
def linear_scan_vjp(
    dh, a, h, h0, entry, da, db, dh0, dh_b, dh_t, a_b, a_t, h_b, h_t, T, D, segment, count, COMPLEX: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """da, db (b, t, d, c) and dh0 (b, d, c) from the μ that enters each segment at its end, entry (b, s, d, c) or None.

    Any of dh, h0, da, db, dh0 may be None. Bytes: dh, a, h, da, db once each (h once more per UNROLL rows, from cache).
    """
    pid = tl.program_id(0)
    batch, s = pid // count, pid % count
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    width: tl.constexpr = 2 if COMPLEX else 1
    start = s * segment
    steps = tl.minimum(segment, T - start)
    size = D * width
    lr = tl.zeros((BLOCK_D,), tl.float32)
    li = lr
    if entry is not None:
        lr, li = load_number(slot(entry, batch, s, count, size), d, mask, 0.0, COMPLEX)
    for k in range(tl.cdiv(steps, UNROLL)):
        t = start + (tl.cdiv(steps, UNROLL) - 1 - k) * UNROLL
        limit = tl.where(mask, start + steps - t, 0)
        ars, ais = load_numbers(row(a, batch, t, a_b, a_t), a_t, d, limit, 1.0, COMPLEX, UNROLL)
        if dh is not None:
            drs, dis = load_numbers(row(dh, batch, t, dh_b, dh_t), dh_t, d, limit, 0.0, COMPLEX, UNROLL)
        if da is not None:
            # h[t-1 … t+U-2]; the row before the first step is h0
            br, bi = load_number(row(h, batch, t - 1, h_b, h_t), d, tl.where(mask, t, 0) > 0, 0.0, COMPLEX)
            if h0 is not None:
                fr, fi = load_number(slot(h0, batch, 0, 1, size), d, tl.where(mask, t, 1) == 0, 0.0, COMPLEX)
                br, bi = br + fr, bi + fi
            hrs, his = load_numbers(row(h, batch, t, h_b, h_t), h_t, d, limit - 1, 0.0, COMPLEX, UNROLL - 1)
            hrs = (br,) + hrs
            his = (bi,) + his
        for i in tl.static_range(UNROLL - 1, -1, -1):
            if dh is not None:
                lr, li = lr + drs[i], li + dis[i]
            if db is not None:
                store_number(slot(db, batch, t + i, T, size), d, lr, li, i < limit, COMPLEX)
            if da is not None:
                gr, gi = multiply_add(hrs[i], -his[i], lr, li, 0.0, 0.0, COMPLEX)
                store_number(slot(da, batch, t + i, T, size), d, gr, gi, i < limit, COMPLEX)
            lr, li = multiply_add(ars[i], -ais[i], lr, li, 0.0, 0.0, COMPLEX)
    if dh0 is not None:  # noqa: SIM102 - the outer one is decided while compiling
        if s == 0:
            store_number(slot(dh0, batch, 0, 1, size), d, lr, li, mask, COMPLEX)
