"""How tensors are handed to kernels: time-major rows with unit stride inside, states and parameters as contiguous float32."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


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
    """(B, T, *S) with contiguous inner dimensions (a copy where they aren't), complex numbers as two reals."""
    if t is None:
        return None
    t, inner = reals(t), 1
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
