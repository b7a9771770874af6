"""Grouped products for every device: rows sorted by group, then one product for each group that has rows.

How many rows a group has is read back from the device once a call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adjcomp.runtime.kernels.arithmetic import Mask


def _groups(group: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Each group that is named, with its rows in their order."""
    order = torch.argsort(group, stable=True)
    sizes = torch.bincount(group, minlength=count).tolist()
    if len(sizes) > count:
        raise IndexError(f"adjcomp.ops.grouped_linear: a row names group {len(sizes) - 1} of {count}")
    yield from ((index, rows) for index, rows in enumerate(order.split(sizes)) if rows.numel())


def grouped_linear(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """See `adjcomp.ops.grouped_linear`."""
    y = x.new_empty((x.shape[0], weight.shape[2]))
    for index, rows in _groups(group, weight.shape[0]):
        y[rows] = x[rows] @ weight[index]
    return y


def grouped_linear_vjp(dy: Tensor, x: Tensor, weight: Tensor, group: Tensor, mask: Mask) -> tuple[Tensor | None, ...]:
    """dx[n] = dy[n] @ weight[group[n]]ᵀ; dweight[e] = Σ over its rows of x[n] dy[n]ᵀ."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if mask[0] else None
    dweight = torch.zeros(weight.shape, dtype=weight.dtype, device=x.device) if mask[1] else None
    for index, rows in _groups(group, weight.shape[0]):
        given = dy[rows]
        if dx is not None:
            dx[rows] = given @ weight[index].mT
        if dweight is not None:
            torch.mm(x[rows].mT, given, out=dweight[index])
    return dx, dweight
