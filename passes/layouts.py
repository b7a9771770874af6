"""Products that put time last, rewritten to put it first: the rest of a tile is time-major, and copies between the two layouts
cost more
than the product."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_SAME_SHAPE = (aten.view.default, aten.expand.default)


def weights_on_the_right(graph: fx.Graph) -> None:
    """`W @ Xᵀ` with a weight W (D, R) shared by the batch and X (B, T, R) becomes `(X Wᵀ)ᵀ`: one matrix product over all rows."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.bmm.default:
            weight, moving = _shared_weight(node.args[0]), _same_shape_source(node.args[1])
            if weight is not None and moving.target is aten.transpose.int and set(moving.args[1:]) in ({1, 2}, {-1, -2}):
                _rewrite(graph, node, weight, moving.args[0])


def _same_shape_source(node: Any) -> fx.Node:
    """What a node shows through views and expands that change nothing."""
    while node.target in _SAME_SHAPE and node.args[0].meta["val"].shape == node.meta["val"].shape:
        node = node.args[0]
    found: fx.Node = node
    return found


def _shared_weight(node: Any) -> fx.Node | None:
    """The (D, R) weight that a (B, D, R) value repeats over the batch."""
    source = _same_shape_source(node)
    if source.target is aten.expand.default and source.args[0].meta["val"].ndim == 2:
        return source.args[0]  # type: ignore[return-value]
    if source.target is aten.unsqueeze.default and source.args[1] == 0:
        return source.args[0]  # type: ignore[return-value]
    return None


def _rewrite(graph: fx.Graph, node: fx.Node, weight: fx.Node, x_btr: fx.Node) -> None:
    batch, _, features = x_btr.meta["val"].shape
    if not isinstance(batch, int) or not x_btr.meta["val"].is_floating_point():
        return
    outputs = weight.meta["val"].shape[0]

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        value = target(*fx.map_arg(args, lambda a: a.meta["val"]))
        made.meta = {**{key: node.meta[key] for key in ("where", "no_grad") if key in node.meta}, "val": value}
        return made

    with graph.inserting_before(node):
        steps = call(aten.sym_size.int, x_btr, 1)
        rows = steps if batch == 1 else call(operator.mul, batch, steps)
        product = call(aten.mm.default, call(aten.view.default, x_btr, [rows, features]), call(aten.t.default, weight))
        result = call(aten.transpose.int, call(aten.view.default, product, [batch, steps, outputs]), 1, 2)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
