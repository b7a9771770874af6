"""Small functions that the kernels share. All arithmetic is float32; see `softplus` for the one that needs care."""

# mypy: disable-error-code="assignment"
# Tuples of rows grow while they are built.

import triton
import triton.language as tl


@triton.jit
def log1p_of_at_most_one(e):
    """log(1 + e) for 0 <= e <= 1, relative error below 2e-7.

    2 atanh(s) with s = e / (2 + e) <= 1/3 as a series. A GPU's log(1 + e) has lost the digits of a small e: a step size of 0.001
    would carry an error of 1e-4.
    """
    s = e / (2.0 + e)
    q = s * s
    p = 1.0 / 15.0 * q + 1.0 / 13.0
    p = p * q + 1.0 / 11.0
    p = p * q + 1.0 / 9.0
    p = p * q + 1.0 / 7.0
    p = p * q + 1.0 / 5.0
    p = p * q + 1.0 / 3.0
    return 2.0 * s + 2.0 * s * q * p


@triton.jit
def softplus(x):
    """log(1 + exp(x)); NaN stays NaN."""
    return tl.maximum(x, 0.0) + log1p_of_at_most_one(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    """The derivative of x sigmoid(x)."""
    gate = sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))


@triton.jit
def row(p, b, t, stride_b, stride_t):
    """Pointer to the first element of (b, t); the products are 64-bit, whatever width the strides came in."""
    return p + (tl.cast(b, tl.int64) * stride_b + tl.cast(t, tl.int64) * stride_t)


@triton.jit
def slot(p, i, j, count, size):
    """Pointer to slot j of i in a contiguous array of `count` slots of `size` elements for each i; 64-bit as well."""
    return p + (tl.cast(i, tl.int64) * count + j) * size


@triton.jit
def load_row(p, d, mask):
    """One row, or the masked part of it, in float32."""
    return tl.load(p + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rows(p, stride, d, limit, other, U: tl.constexpr):
    """U rows that follow each other as a tuple, read before anything is stored; row i is `other` where i >= limit."""
    out = (tl.load(p + d, mask=limit > 0, other=other).to(tl.float32),)
    for i in tl.static_range(1, U):
        p += stride
        out = out + (tl.load(p + d, mask=i < limit, other=other).to(tl.float32),)
    return out
