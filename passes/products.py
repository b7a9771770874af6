"""Matrix products of a VJP that add to what is there already: cotangents are joined and summed by the products themselves, not in
memory.

Where a projection's output was split, its cotangent is a concatenation, read by two products. Each part has a product of its own
instead: `cat(a, b) W` becomes `a W₁ + b W₂`, and the rows of `cat(a, b)ᵀ x` are `aᵀ x` and `bᵀ x`. And `r + p q` becomes one
`addmm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from adjcomp.passes.aliasing import is_fresh
from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
_EXACT = (torch.float32, torch.float64)  # a sum of rounded products would lose digits of narrower ones


def add_in_products(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Both rewrites, on what depends on `tangents`: the forward stays as it is traced, whether it keeps or not."""
    for node in _reached(graph, tangents, aten.cat.default):
        found = _concatenation(node)
        if found is not None:
            found.split()
    for node in _reached(graph, tangents, aten.add.Tensor):
        _fuse_sum(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _reached(graph: fx.Graph, tangents: Sequence[fx.Node], target: Any) -> list[fx.Node]:
    reached = set(tangents)
    for node in graph.nodes:
        if node.op == "call_function" and any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return [node for node in graph.find_nodes(op="call_function", target=target) if node in reached]


@dataclass(frozen=True)
class _Concatenation:
    """parts: (..., k_i) each. readers: views of the whole as (rows, K), and the products over each, or over its transpose."""

    parts: list[fx.Node]
    readers: list[tuple[fx.Node, list[fx.Node]]]

    def split(self) -> None:
        """Give each part products of its own."""
        widths = [part.meta["val"].shape[-1] for part in self.parts]
        starts = [0, *itertools.accumulate(widths)]
        for whole, products in self.readers:
            emit = Emitter(whole.graph, set())
            rows = whole.args[1][0]  # type: ignore[index]
            with whole.graph.inserting_before(whole):
                parts = zip(self.parts, widths, strict=True)
                pieces = [emit.call(whole, aten.view.default, part, [rows, width]) for part, width in parts]
            for product in products:
                with product.graph.inserting_before(product):
                    product.replace_all_uses_with(_over_pieces(emit, product, whole, pieces, starts))


def _over_pieces(emit: Emitter, product: fx.Node, whole: fx.Node, pieces: list[fx.Node], starts: list[int]) -> fx.Node:
    left: Any
    right: Any
    left, right = product.args
    if left is whole:
        total: fx.Node | None = None
        for piece, start, stop in zip(pieces, starts, starts[1:], strict=False):
            weight = emit.call(product, aten.slice.Tensor, right, 0, start, stop)
            if total is None:
                total = emit.call(product, aten.mm.default, piece, weight)
            else:
                total = emit.call(product, aten.addmm.default, total, piece, weight)
        assert total is not None
        return total
    if right is whole:
        return emit.call(product, aten.cat.default, [emit.call(product, aten.mm.default, left, piece) for piece in pieces], 1)
    turned = [emit.call(product, aten.t.default, piece) for piece in pieces]
    return emit.call(product, aten.cat.default, [emit.call(product, aten.mm.default, piece, right) for piece in turned], 0)


def _concatenation(node: fx.Node) -> _Concatenation | None:
    """The concatenation of cotangents along channels, where products read it and nothing else does, and a copy costs more than
    sums in place.
    """
    value = node.meta["val"]
    parts = node.args[0]
    if value.dtype not in _EXACT or value.ndim < 2 or _dim(node) != value.ndim - 1 or len(parts) < 2:  # type: ignore[arg-type]
        return None
    found = []
    for whole in node.users:
        products: list[fx.Node] = []
        if whole.target is not aten.view.default or not _merges_rows(whole, value):
            return None
        for user in whole.users:
            readers = list(user.users) if user.target is aten.t.default else [user]
            if not readers or not all(_is_split_well(reader, whole, user, len(parts)) for reader in readers):  # type: ignore[arg-type]
                return None
            products += readers
        found.append((whole, products))
    if not all(_can_merge(part, node) for part in parts):  # type: ignore[union-attr]
        return None
    return _Concatenation(list(parts), found)  # type: ignore[arg-type]


def _dim(cat: fx.Node) -> int:
    return int(argument(cat, "dim")) % int(cat.meta["val"].ndim)


def _merges_rows(whole: fx.Node, value: torch.Tensor) -> bool:
    shape = whole.meta["val"].shape
    return len(shape) == 2 and isinstance(shape[1], int) and shape[1] == value.shape[-1]


def _can_merge(part: fx.Node, cat: fx.Node) -> bool:
    """Whether a part is dense, as what an op returns is, and of a known width."""
    value = part.meta["val"]
    return isinstance(value.shape[-1], int) and _is_dense(value) and value.dtype is cat.meta["val"].dtype


def _is_dense(value: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size != 1 and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _is_split_well(product: fx.Node, whole: fx.Node, read: fx.Node, count: int) -> bool:
    """Whether parts cost a product less than the copy: `whole @ W` then writes its result once for each of them; the gradient of
    a weight takes each part in place, if nothing else reads it.
    """
    if product.target is not aten.mm.default:
        return False
    left, right = product.args
    if left is whole and right is not whole and read is product:
        return bool(whole.meta["val"].shape[1] > product.meta["val"].shape[1] * (count - 1))
    if (left is read and read is not product) or (right is whole and left is not whole):
        return _only_leaves(product)
    return False


def _only_leaves(product: fx.Node) -> bool:
    users = list(product.users)
    if len(users) == 1 and users[0].target is aten.t.default:
        users = list(users[0].users)
    return [user.op for user in users] == ["output"]


def _fuse_sum(node: fx.Node) -> None:
    """`r + p q`, of equal shapes, where nobody else reads r or the product."""
    value = node.meta["val"]
    if node.kwargs or value.dtype not in _EXACT:
        return
    for kept, made in (node.args, node.args[::-1]):
        if not isinstance(kept, fx.Node) or not isinstance(made, fx.Node):
            return
        product = _sole_product(made)
        if product is None or not is_fresh(kept) or kept.meta["val"].shape != value.shape:
            continue
        if kept.meta["val"].dtype is not value.dtype or made.meta["val"].shape != value.shape or not _is_dense(kept.meta["val"]):
            continue
        _rewrite_sum(node, kept, made, product)
        return


def _sole_product(made: fx.Node) -> fx.Node | None:
    """The product that a value shows and nobody else reads."""
    while len(made.users) == 1 and made.target is aten.view.default:
        made = made.args[0]  # type: ignore[assignment]
    return made if made.target is aten.mm.default and len(made.users) == 1 else None


def _rewrite_sum(node: fx.Node, kept: fx.Node, made: fx.Node, product: fx.Node) -> None:
    if made is product:
        rows, shape = None, None
    else:
        rows, shape = _rows_argument(made, product), made.args[1]
    emit = Emitter(node.graph, set())
    with node.graph.inserting_before(node):
        base = kept if rows is None else emit.call(node, aten.view.default, kept, rows)
        total = emit.call(node, aten.addmm.default, base, *product.args)
        if shape is not None:
            total = emit.call(node, aten.view.default, total, shape)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)


def _rows_argument(made: fx.Node, product: fx.Node) -> list[Any]:
    """The sizes of a product, as nodes or numbers: those of its left factor's view."""
    left: Any = product.args[0]
    emit = Emitter(product.graph, set())
    with product.graph.inserting_before(product):
        return [emit.sizes(made, left)[0], product.meta["val"].shape[1]]
