"""Summaries of ranges of time at work: what they do to a state.

A summary is (product, end): a state becomes product · state + end. Those of cotangents are the same, with products that are
adjoint already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjcomp.ir.joining import CarryKind, CarryRule

Summary = tuple[Tensor, Tensor]


def unit(rule: CarryRule, device: torch.device) -> Tensor:
    """The product of an empty range."""
    if rule.kind is CarryKind.ELEMENTWISE:
        return torch.ones(rule.product_shape, dtype=rule.dtype, device=device)
    identity = torch.eye(rule.product_shape[-1], dtype=rule.dtype, device=device)
    return identity.expand(rule.product_shape).contiguous()


def applied(rule: CarryRule, summary: Summary, state: Tensor) -> Tensor:
    """The state after a range, from that before it."""
    return _MOVED[rule.kind](*summary, state)


def _elementwise(product: Tensor, end: Tensor, state: Tensor) -> Tensor:
    return torch.addcmul(end, product, state)


def _vector(product: Tensor, end: Tensor, state: Tensor) -> Tensor:
    return torch.baddbmm(end[..., None], product, state[..., None])[..., 0]


def _matrix(product: Tensor, end: Tensor, state: Tensor) -> Tensor:
    return torch.baddbmm(end.flatten(0, 1), product.flatten(0, 1), state.flatten(0, 1)).view(end.shape)


_MOVED: dict[CarryKind, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    CarryKind.ELEMENTWISE: _elementwise,
    CarryKind.VECTOR: _vector,
    CarryKind.MATRIX: _matrix,
}
