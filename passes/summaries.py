"""The carried ops that are linear in their state: how a range of time moves it, and the nodes that say so."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import adjcomp.ops  # noqa: F401  (declares the ops named below)
from adjcomp.ir.joining import CarryKind
from adjcomp.passes.emitting import Emitter, fake_result

aten = torch.ops.aten
_ops = torch.ops.adjcomp


@dataclass(frozen=True)
class LinearOp:
    """A carried op, the op of its summary and of its adjoint summary.

    forward, adjoint: where an argument of a summary has another name among the op's, or its VJP's, arguments: queries don't
    enter a state, nor values its adjoint, so that whatever has their shape stands for them. like: the argument of the VJP that
    has shape and dtype of the output, for one that gets no cotangent.
    """

    kind: CarryKind
    summary: Any
    adjoint_summary: Any
    forward: dict[str, str]
    adjoint: dict[str, str]
    like: str


def _linear(name: str, kind: CarryKind, like: str, forward: dict[str, str], adjoint: dict[str, str]) -> LinearOp:
    summary, adjoint_summary = (getattr(_ops, f"{name}{suffix}").default for suffix in ("_summary", "_adjoint_summary"))
    return LinearOp(kind, summary, adjoint_summary, forward, adjoint, like)


_BY_NAME = {
    "linear_scan": _linear("linear_scan", CarryKind.ELEMENTWISE, "h", {}, {}),
    "dense_scan": _linear("dense_scan", CarryKind.VECTOR, "h", {"A": "a"}, {"A": "a"}),
    "selective_scan": _linear("selective_scan", CarryKind.ELEMENTWISE, "x", {}, {}),
    "ssd": _linear("ssd", CarryKind.ELEMENTWISE, "x", {}, {}),
    "gated_delta_rule": _linear("gated_delta_rule", CarryKind.MATRIX, "v", {"q": "k"}, {"v": "dy"}),
}
LINEAR_OPS: dict[Any, LinearOp] = {getattr(_ops, name).default: op for name, op in _BY_NAME.items()}
LINEAR_VJPS: dict[Any, LinearOp] = {getattr(_ops, f"{name}_vjp").default: op for name, op in _BY_NAME.items()}
CONV = _ops.causal_conv1d.default


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of one of our ops, which are all positional."""
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=True))


def summary_arguments(node: fx.Node) -> list[Any]:
    """What the summary of a carried op takes, of the op's own arguments."""
    op, given = LINEAR_OPS[node.target], named_arguments(node)
    return [given[op.forward.get(entry.name, entry.name)] for entry in op.summary._schema.arguments]


def fake_summary(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Product and end state of a carried op, without data."""
    found: tuple[torch.Tensor, torch.Tensor] = fake_result(LINEAR_OPS[node.target].summary, summary_arguments(node), {})
    return found


def emit_summary(graph: fx.Graph, node: fx.Node, state: fx.Node, product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Before a carried op: its state after the chunk, from `state` before it, and the running product with the chunk's."""
    return _joined(graph, node, LINEAR_OPS[node.target], LINEAR_OPS[node.target].summary, summary_arguments(node), state, product)


def emit_adjoint_summary(graph: fx.Graph, vjp: fx.Node, product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Before the VJP of a carried op: the cotangent of the state before the chunk, and the running product of cotangents."""
    op, given = LINEAR_VJPS[vjp.target], named_arguments(vjp)
    names = [entry.name for entry in op.adjoint_summary._schema.arguments]
    if given[names[0]] is None:
        with graph.inserting_before(vjp):
            given[names[0]] = Emitter(graph, set()).call(vjp, aten.zeros_like.default, given[op.like])
    arguments = [given[op.adjoint.get(name, name)] for name in names]
    return _joined(graph, vjp, op, op.adjoint_summary, arguments, given["dh_last"], product)


def _joined(
    graph: fx.Graph, node: fx.Node, op: LinearOp, target: Any, arguments: list[Any], state: fx.Node | None, product: fx.Node
) -> tuple[fx.Node, fx.Node]:
    emit = Emitter(graph, set())

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit.call(node, target, *args, **kwargs)

    with graph.inserting_before(node):
        made = call(target, *arguments)
        move, end = (call(operator.getitem, made, i) for i in range(2))
        return end if state is None else _APPLIED[op.kind](call, move, state, end), _PRODUCTS[op.kind](call, move, product)


Call = Callable[..., fx.Node]


def _elementwise(call: Call, move: fx.Node, state: fx.Node, end: fx.Node) -> fx.Node:
    return call(aten.addcmul.default, end, move, state)


def _vector(call: Call, move: fx.Node, state: fx.Node, end: fx.Node) -> fx.Node:
    columns = [call(aten.unsqueeze.default, value, 2) for value in (end, state)]
    return call(aten.squeeze.dim, call(aten.baddbmm.default, columns[0], move, columns[1]), 2)


def _matrix(call: Call, move: fx.Node, state: fx.Node, end: fx.Node) -> fx.Node:
    flat = [_flat(call, value) for value in (end, move, state)]
    return call(aten.view.default, call(aten.baddbmm.default, *flat), list(end.meta["val"].shape))


def _flat(call: Call, value: fx.Node) -> fx.Node:
    batch, heads, rows, columns = value.meta["val"].shape
    return call(aten.view.default, value, [batch * heads, rows, columns])


def _matrix_product(call: Call, move: fx.Node, product: fx.Node) -> fx.Node:
    made = call(aten.bmm.default, _flat(call, move), _flat(call, product))
    return call(aten.view.default, made, list(move.meta["val"].shape))


_APPLIED: dict[CarryKind, Callable[[Call, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    CarryKind.ELEMENTWISE: _elementwise,
    CarryKind.VECTOR: _vector,
    CarryKind.MATRIX: _matrix,
}
_PRODUCTS: dict[CarryKind, Callable[[Call, fx.Node, fx.Node], fx.Node]] = {
    CarryKind.ELEMENTWISE: lambda call, move, product: call(aten.mul.Tensor, move, product),
    CarryKind.VECTOR: lambda call, move, product: call(aten.bmm.default, move, product),
    CarryKind.MATRIX: _matrix_product,
}
