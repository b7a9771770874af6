"""Small pieces of arithmetic that several kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

Mask = list[bool]
SOFTPLUS_THRESHOLD = 20.0  # torch's: above it softplus is the identity


def step_size(dt: Tensor, bias: Tensor | None, softplus: bool, limit: list[float] | None = None) -> Tensor:
    """δ = clamp(softplus(dt + bias), limit), in dt's dtype; each part only where it is asked for."""
    delta = dt if bias is None else dt + bias
    if softplus:
        delta = torch.nn.functional.softplus(delta)
    return delta if limit is None else delta.clamp(limit[0], limit[1])


def step_size_vjp(ddelta: Tensor, dt: Tensor, bias: Tensor | None, softplus: bool, limit: list[float] | None = None) -> Tensor:
    """The cotangent of dt (and, summed, of bias) from that of δ; as torch, a clamp passes it at its bounds."""
    raw = dt if bias is None else dt + bias
    if limit is not None:
        delta = torch.nn.functional.softplus(raw) if softplus else raw
        ddelta = torch.where((delta >= limit[0]) & (delta <= limit[1]), ddelta, 0.0)
    if softplus:
        ddelta = torch.where(raw > SOFTPLUS_THRESHOLD, ddelta, ddelta * torch.sigmoid(raw))
    return ddelta


def silu_vjp(dy: Tensor, z: Tensor) -> Tensor:
    """dy times the derivative of z sigmoid(z)."""
    gate = torch.sigmoid(z)
    return dy * gate * (1 + z * (1 - gate))


def widen(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """Each tensor in `dtype` (no copy where it has it already)."""
    return [None if t is None else t.to(dtype) for t in tensors]


def slot(sums: list[Tensor | None], index: int) -> Tensor:
    """An accumulator that is known to exist (those of optional inputs may not)."""
    found = sums[index]
    if found is None:
        raise LookupError(f"no accumulator {index}")
    return found


def cast_like(grads: list[Tensor | None], inputs: list[Tensor | None], mask: Mask) -> list[Tensor | None]:
    """Each cotangent in the dtype of its input, contiguous; None where the mask is False or there is no input."""
    return [
        _dense(g, t.dtype) if keep and g is not None and t is not None else None
        for g, t, keep in zip(grads, inputs, mask, strict=True)
    ]


def _dense(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In one pass where dtype or layout is another (`to` keeps strides), and as it is where they aren't."""
    if value.is_contiguous():
        return value.to(dtype)
    return torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)
