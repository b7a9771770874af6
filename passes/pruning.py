"""A part of a graph on its own: the results asked for, and nothing that they don't need."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy without results, and the copy of each node."""
    copy = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            memo[node] = copy.node_copy(node, lambda a: memo[a])
    return copy, memo


def prune(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """Keep what `results` need, in place, and all placeholders. Ops that make several cotangents make those that are read."""
    graph.output(tuple(results))
    drop_dead(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            _narrow_mask(node)
    drop_dead(graph)


def drop_dead(graph: fx.Graph) -> None:
    """Erase what nothing reads, but for placeholders."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def drop_sizes(graph: fx.Graph) -> None:
    """Sizes become plain or symbolic numbers, so that a value of which only the size is read isn't needed."""
    for node in graph.nodes:
        node.args = fx.map_arg(node.args, _number_of)
        node.kwargs = fx.map_arg(node.kwargs, _number_of)
    drop_dead(graph)


def _number_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, int | torch.SymInt) else node


def drop_unread(graph: fx.Graph) -> list[int]:
    """Erase the placeholders that nothing reads; the positions of those that stay."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    return [position for position, node in enumerate(placeholders) if not node._erased]


def _narrow_mask(node: fx.Node) -> None:
    """Turn off the cotangents that nothing reads, where an op has a mask over them."""
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [entry.name for entry in schema.arguments]
    position = next((names.index(name) for name in ("mask", "output_mask") if name in names), None)
    if position is None or len(schema.returns) != len(node.args[position]):  # type: ignore[union-attr, arg-type]
        return
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    mask = [wanted and i in read for i, wanted in enumerate(node.args[position])]  # type: ignore[arg-type, union-attr]
    node.update_arg(position, mask)
    node.meta["val"] = tuple(v if wanted else None for v, wanted in zip(node.meta["val"], mask, strict=True))
