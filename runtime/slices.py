"""Chunks of whole-sequence tensors."""

from __future__ import annotations

import torch

from adjcomp.ir.stack import TimeAxis


def slice_in_place(whole: torch.Tensor, axis: TimeAxis, span: tuple[int, int]) -> torch.Tensor:
    """A view of steps span[0] … span[1] - 1, for reading or writing; where batch and time are merged the view splits them.

    whole: dimension `axis.dim` has size outer · T · inner. The view has shape (…, outer, steps · inner, …) when outer > 1.
    """
    start, end = span
    if axis.outer == 1:
        return whole.narrow(axis.dim, start * axis.inner, (end - start) * axis.inner)
    shape = list(whole.shape)
    shape[axis.dim : axis.dim + 1] = [axis.outer, shape[axis.dim] // axis.outer]
    return whole.view(shape).narrow(axis.dim + 1, start * axis.inner, (end - start) * axis.inner)


def chunk_of(whole: torch.Tensor, axis: TimeAxis, span: tuple[int, int]) -> torch.Tensor:
    """Steps span[0] … span[1] - 1 in the layout a tile expects: batch and time merged as they are in `whole`."""
    part = slice_in_place(whole, axis, span)
    if axis.outer == 1:
        return part
    return part.flatten(axis.dim, axis.dim + 1)
