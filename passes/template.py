"""Canonical text of a tile graph: layers with equal texts share one template, so later passes cost O(distinct layers)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from adjcomp.ir.stack import TileInput, TileOutput


def template_key(graph: fx.Graph, inputs: Iterable[TileInput], outputs: Iterable[TileOutput], window: int | None = None) -> str:
    """One line a node: op, arguments by number, shape, strides and dtype; and the window of its recurrences' adjoints."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines = [
        f"inputs {[(i.kind.value, i.differentiable) for i in inputs]}",
        f"outputs {[(o.kind.value, o.differentiable) for o in outputs]}",
    ]
    if window is not None:
        lines.append(f"adjoint window {window}")
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda a: _Numbered(number[a]))  # type: ignore[return-value]
        target = node.op if node.op == "placeholder" else str(node.target)
        lines.append(f"{target} {args} {_describe(node.meta.get('val'))} {bool(node.meta.get('no_grad'))}")
    return "\n".join(lines)


class _Numbered:
    """Prints as %number in the arguments of a line."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(map(str, value.shape))}{tuple(map(str, value.stride()))}{value.device}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_describe(v) for v in value)})"
    return str(value)
