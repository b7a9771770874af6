"""Gradients that are matrix products, or made of a few, or have only a span that isn't zero: each part is added to its place in
the accumulator, and the whole is never made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.ir.program import Span
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
_NARROW, _TALL = 32, 8
_ADDED_IN_PLACE = (torch.float32, torch.float64)  # accumulators have no narrower dtype


@dataclass(frozen=True)
class Share:
    """A product that is added to (the transpose of) an accumulator, or to a span of that."""

    product: fx.Node
    transposed: bool
    span: Span | None

    @property
    def is_tall(self) -> bool:
        """Whether the product is so much higher than wide that libraries are faster at its transpose (twice on a CPU); that is
        small enough to be held and added.
        """
        rows, columns = self.product.meta["val"].shape
        return self.span is None and columns <= _NARROW and rows >= _TALL * columns


def products_in(gradient: fx.Node) -> list[Share]:
    """The products that a gradient is made of, each read by nobody else; none where it isn't."""
    transposed = gradient.target is aten.t.default
    whole = gradient.all_input_nodes[0] if transposed else gradient
    if transposed and len(whole.users) != 1:
        return []
    if _is_product(whole):
        return [Share(whole, transposed, None)]
    sliced = None if transposed else part_of(gradient)
    if sliced is not None and _is_product(sliced[0]) and len(sliced[0].users) == 1:
        return [Share(sliced[0], False, sliced[1])]
    if whole.target is not aten.cat.default or not all(_is_product(p) and len(p.users) == 1 for p in whole.all_input_nodes):
        return []
    dim, start, found = int(argument(whole, "dim")) % 2, 0, []
    for part in whole.all_input_nodes:
        stop = start + part.meta["val"].shape[dim]
        found.append(Share(part, transposed, Span(dim, start, stop)))
        start = stop
    return found


def part_of(gradient: fx.Node) -> tuple[fx.Node, Span] | None:
    """The part of a gradient beside which all is zero, and where it lies: that of a parameter of which a slice was read."""
    if gradient.target is not aten.slice_backward.default:
        return None
    part, _, dim, start, stop, step = gradient.args
    dim = int(dim) % gradient.meta["val"].ndim  # type: ignore[arg-type]
    if step != 1 or dim > 1 or not isinstance(part, fx.Node) or not isinstance(start, int) or not isinstance(stop, int):
        return None
    return part, Span(dim, start, stop)


def folded_into(gradient: fx.Node) -> list[fx.Node]:
    """The nodes of a gradient that `products_in` takes apart, which need not be made."""
    whole = gradient.all_input_nodes[0] if gradient.target is aten.t.default else gradient
    return [gradient, whole, *(whole.all_input_nodes if whole.target in (aten.cat.default, aten.slice_backward.default) else [])]


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.mm.default and node.meta["val"].dtype in _ADDED_IN_PLACE
