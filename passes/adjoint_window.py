"""Truncated adjoint sharding: the VJP of every recurrence becomes one whose adjoint reaches back a fixed number of steps.

In the joint graph of a tile the cotangent of a recurrence's outgoing state gives way to what the window needs of the steps after
the chunk (see `adjcomp.ops.windowed`), and the gradient of its incoming state to the same of the steps from the chunk's first on.
Convolution tails are no recurrences and keep their cotangents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.ops.windowed import FEATURES
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.cut import where
from adjcomp.passes.summaries import CONV

_ops = torch.ops.adjcomp
RECURRENCES: dict[Any, str] = {getattr(_ops, name).default: name for name in FEATURES}
_WINDOWED: dict[Any, Any] = {getattr(_ops, f"{n}_vjp").default: getattr(_ops, f"{n}_window_vjp").default for n in FEATURES}

# Where a VJP takes the states that its forward kept, in a layout of the kernel's own; the windowed one takes the state before the
# chunk instead.
_KEPT: dict[Any, int] = {
    _ops.selective_scan_vjp.default: 10,
    _ops.ssd_vjp.default: 10,
    _ops.gated_delta_rule_vjp.default: 7,
}


def check_recurrences(carried: Iterable[fx.Node], window: int) -> None:
    """CaptureError where a model has nothing to truncate, or a state whose adjoint isn't known by windows."""
    nodes = list(carried)
    endless = [node for node in nodes if node.target not in (*RECURRENCES, CONV)]
    if endless:
        raise CaptureError(
            f"adjoint_window={window}: {where(endless[0])}: {endless[0].target} has no windowed adjoint (those that have one are "
            f"{', '.join(FEATURES)}); use adjoint_window=None"
        )
    if not any(node.target in RECURRENCES for node in nodes):
        raise CaptureError(
            f"adjoint_window={window} truncates linear recurrences (adjcomp.ops: {', '.join(FEATURES)}), and this model has "
            "none; use adjoint_window=None"
        )


def check_no_attention(stored: Iterable[fx.Node], window: int) -> None:
    """CaptureError where a model attends: `stored` are its keys and values."""
    first = next(iter(stored), None)
    if first is not None:
        raise CaptureError(
            f"{where(first)}: adjoint_window={window} cuts off what recurrences hand back, and attention has none; use "
            "adjoint_window=None"
        )


def windowed_shape(node: fx.Node, window: int) -> tuple[int, ...]:
    """Shape of what travels backward in time for a recurrence: (batch, state + (window - 1) · features)."""
    state = node.meta["val"][CARRIED_OPS[node.target].state_output]
    shapes = [tuple(a.meta["val"].shape) for a in node.args if isinstance(a, fx.Node)]
    features = FEATURES[RECURRENCES[node.target]](*shapes)
    return int(state.shape[0]), math.prod(int(size) for size in state.shape[1:]) + (window - 1) * int(features)


def cut_to_window(graph: fx.Graph, template: Template, cotangents: tuple[int, ...]) -> None:
    """Rewrite the joint graph of a template in place; after its inputs come the cotangents of the outputs `cotangents`."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs, tangents = placeholders[: len(template.inputs)], placeholders[len(template.inputs) :]
    before = {e.index: n for n, e in zip(inputs, template.inputs, strict=True) if e.kind is InputKind.CARRY}
    entries = [template.outputs[i] for i in cotangents]
    states = {t: before[e.index] for t, e in zip(tangents, entries, strict=True) if e.kind is OutputKind.CARRY}
    assert template.window is not None
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _WINDOWED:
            _cut(graph, node, template.window, states)


def _cut(graph: fx.Graph, node: fx.Node, window: int, states: dict[fx.Node, fx.Node]) -> None:
    """states: the state before the chunk, by the cotangent of the state after it."""
    tangent = node.args[1]
    if not isinstance(tangent, fx.Node) or tangent not in states or len(tangent.users) != 1:
        raise CaptureError(f"adjoint_window={window}: the state of {node.target} is read by more than the next chunk")
    state = tangent.meta["val"]
    shape = _adjoint_shape(node, state, window)
    with state.fake_mode:
        tangent.meta["val"] = torch.empty(shape, dtype=state.dtype, device=state.device)
    with graph.inserting_before(node):
        args = [states[tangent] if i == _KEPT.get(node.target) else argument for i, argument in enumerate(node.args)]
        made = graph.call_function(_WINDOWED[node.target], (*args, window))
    values = list(node.meta["val"])
    values[-1] = tangent.meta["val"]
    made.meta = {**node.meta, "val": tuple(values)}
    for user in list(node.users):
        if user.args[1] == len(values) - 1:
            user.meta["val"] = tangent.meta["val"]
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _adjoint_shape(node: fx.Node, state: torch.Tensor, window: int) -> tuple[int, ...]:
    name = next(n for n in FEATURES if getattr(_ops, f"{n}_vjp").default is node.target)
    shapes = [tuple(a.meta["val"].shape) for a in node.args[2:] if isinstance(a, fx.Node)]
    return int(state.shape[0]), math.prod(int(size) for size in state.shape[1:]) + (window - 1) * int(FEATURES[name](*shapes))
