"""The residual form of adjoint sharding: a layer's branch reads the residual stream as a constant.

A layer computes x + f(x). Its path of identity, the spine, is the chain of additions and casts from the tile's input to its
output. Whatever leaves the spine is detached: the cotangent of the stream passes the tile unchanged, and the VJP of f ends at x.
"""

from __future__ import annotations

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.cut import is_size, where

aten = torch.ops.aten
_SAME = {aten._to_copy.default, aten.clone.default, aten.alias.default}


def detach_branches(graph: fx.Graph, stream_input: fx.Node, stream_output: fx.Node, layer: str) -> None:
    """Rewrite a tile graph in place, so that the branches of its layer see `stream_input` as a constant.

    Raises CaptureError where the output is not the input plus something.
    """
    spine = _spine(stream_input, stream_output)
    if spine is None:
        raise CaptureError(
            f"{where(stream_output)}: coupling='residual' needs layers that add to their input, and {layer} has no path of "
            "additions from its input to its output; use coupling='exact'"
        )
    for node, successor in zip(spine, [*spine[1:], None], strict=True):
        users = [user for user in node.users if user is not successor and user.op == "call_function" and not is_size(user)]
        if users:
            constant = _detached(graph, node)
            for user in users:
                user.replace_input_with(node, constant)
        if successor is not None and successor.args.count(node) > 1:
            raise CaptureError(f"{where(successor)}: coupling='residual' needs layers that add something to their input")


def _spine(source: fx.Node, target: fx.Node) -> list[fx.Node] | None:
    """The nodes from `source` to `target` along additions and casts."""
    stack = [[target]]
    while stack:
        path = stack.pop()
        node = path[-1]
        if node is source:
            return list(reversed(path))
        stack.extend([*path, a] for a in _passed(node))
    return None


def _passed(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node hands on with factor one."""
    if node.op != "call_function":
        return []
    if node.target in _SAME:
        return [node.args[0]]  # type: ignore[list-item]
    if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        return [a for a in reversed(node.args) if isinstance(a, fx.Node) and _shape(a) == _shape(node)]
    return []


def _shape(node: fx.Node) -> tuple[str, ...]:
    """As text: comparing symbolic sizes would add a guard."""
    return tuple(map(str, node.meta["val"].shape))


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        made = graph.call_function(aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made
