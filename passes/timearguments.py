"""What the rules of the time analysis share: arguments by name, dimensions, time axes that line up."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from adjcomp.passes.timeaxis import NotLocalError, TimeContext, TimeLayout, shape_of, value_of


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of an ATen call, positional, by keyword or by default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for position, entry in enumerate(schema):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, entry.default_value)
    raise KeyError(f"{node.target} has no argument {name}")


def dims_of(node: fx.Node, name: str, ndim: int) -> list[int]:
    value = argument(node, name)
    dims = [value] if isinstance(value, int) else list(value or range(ndim))
    return [dim % ndim for dim in dims]


def moved(layout: TimeLayout, dim: int) -> TimeLayout:
    return TimeLayout(dim, layout.outer, layout.inner)


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [a for a in found if isinstance(value_of(a), torch.Tensor)]


def aligned(context: TimeContext, node: fx.Node, tensors: list[fx.Node]) -> TimeLayout | None:
    ndim = len(shape_of(node)) if isinstance(value_of(node), torch.Tensor) else max(len(shape_of(t)) for t in tensors)
    found: set[TimeLayout] = set()
    for tensor in tensors:
        layout = context.layout(tensor)
        if layout is not None:
            found.add(moved(layout, layout.dim - len(shape_of(tensor)) + ndim))
    if len(found) > 1:
        raise NotLocalError(f"{node.target} combines values whose time axes do not line up")
    return found.pop() if found else None
