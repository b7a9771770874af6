"""How tensors are handed to kernels: time-major rows with unit stride inside, states and parameters as contiguous float32."""

from __future__ import annotations

from typing import Any, overload

import torch
import triton.language as tl
from torch import Tensor

MOST_STRIDE = 1 << 24


def is_wide(*tensors: Tensor | None) -> bool:
    """Whether any tensor is float64 or complex128; those run in the torch forms, since the kernels compute in float32."""
    return any(t is not None and t.dtype in (torch.float64, torch.complex128) for t in tensors)


def reals(t: Tensor) -> Tensor:
    """A complex tensor as two reals in a last dimension; a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@overload
def timed(t: Tensor) -> Tensor: ...


@overload
def timed(t: Tensor | None) -> Tensor | None: ...


def timed(t: Tensor | None) -> Tensor | None:
    """(B, T, *S) with contiguous inner dimensions, complex numbers as two reals; a copy where that or the stride of time forbids.

    The stride of time stays below MOST_STRIDE, so that the offsets inside a tile of up to 64 steps fit in 32 bits.
    """
    if t is None:
        return None
    t, inner = reals(t), 1
    if t.shape[1] > 1 and t.stride(1) >= MOST_STRIDE:
        return t.contiguous()
    for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:]), strict=True):
        if size != 1 and stride != inner:
            return t.contiguous()
        inner *= size
    return t


@overload
def parameter(t: Tensor) -> Tensor: ...


@overload
def parameter(t: Tensor | None) -> Tensor | None: ...


def parameter(t: Tensor | None) -> Tensor | None:
    """A state or parameter as contiguous float32, complex numbers as two reals (no copy where it is that already)."""
    return None if t is None else reals(t).to(torch.float32).contiguous()


def strides(name: str, t: Tensor | None) -> dict[str, int]:
    """The kernel arguments `<name>_b` and `<name>_t`: strides of batch and time, in elements."""
    return {f"{name}_b": 0 if t is None else t.stride(0), f"{name}_t": 0 if t is None else t.stride(1)}


def operands(*tensors: Tensor | None) -> dict[str, Any]:
    """The number type of matrix products: constants OPERAND and PRECISION of a kernel.

    bfloat16 inputs multiply as such. float16 has too little range for states, so it multiplies as TF32, and so does float32 where
    torch is told that it may (`torch.backends.cuda.matmul.allow_tf32`); else float32 is exact. Triton's interpreter computes
    bfloat16 wrongly, so there (on a CPU) all is float32.
    """
    given = [t for t in tensors if t is not None]
    dtypes = {t.dtype for t in given}
    if given[0].device.type == "cpu":
        return {"OPERAND": tl.float32, "PRECISION": "ieee"}
    if dtypes == {torch.bfloat16}:
        return {"OPERAND": tl.bfloat16, "PRECISION": "ieee"}
    coarse = dtypes <= {torch.bfloat16, torch.float16} or torch.backends.cuda.matmul.allow_tf32
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if coarse else "ieee"}
