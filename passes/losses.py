"""The fused loss: cross-entropy of a linear head, also of shifted logits, as one op that never holds a (B, T, vocabulary)
value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.passes.carried import LINEAR_CROSS_ENTROPY
from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)


def fuse_cross_entropy(graph: fx.Graph) -> None:
    """`nll_loss(log_softmax(hidden @ weightᵀ))` becomes `linear_cross_entropy`."""
    for node in _calls(graph, aten.nll_loss_forward.default):
        match = _match(node)
        if match is None:
            continue
        emit = Emitter(graph, set())
        ignore_index = argument(node, "ignore_index")
        with graph.inserting_before(node):
            labels = match.labels
            if match.skipped or match.trimmed:  # rows outside of the shifted ones don't count
                labels = emit.call(node, aten.constant_pad_nd.default, labels, [match.skipped, match.trimmed], ignore_index)
            fused = emit.call(node, LINEAR_CROSS_ENTROPY, match.hidden, match.weight, labels, ignore_index, None)
            total, count = (emit.call(node, operator.getitem, fused, i) for i in (0, 1))
            loss = emit.call(node, aten.div.Tensor, total, count) if argument(node, "reduction") == 1 else total
        for user in list(node.users):
            user.replace_all_uses_with(loss if user.args[1] == 0 else count)
            graph.erase_node(user)


def logits_of_losses(graph: fx.Graph) -> set[fx.Node]:
    """Every node that is, up to views, casts to float32 and cuts along time, the logits of a loss of the graph."""
    bases: set[fx.Node] = set()
    for node in _calls(graph, aten.nll_loss_forward.default):
        softmax: fx.Node = node.args[0]  # type: ignore[assignment]
        bases.add(_through(softmax.args[0], _is_same_logits) if softmax.target is aten._log_softmax.default else softmax)  # type: ignore[arg-type]
    heads = {(n.args[0], n.args[1]) for n in _calls(graph, LINEAR_CROSS_ENTROPY)}
    for node in _calls(graph, aten.mm.default):
        hidden, weight_t = node.args
        if weight_t.target is aten.t.default and (_through(hidden, _is_part), weight_t.args[0]) in heads:  # type: ignore[union-attr, arg-type]
            bases.add(node)
    return {n for n in graph.nodes if n.op == "call_function" and _through(n, _is_same_logits) in bases}


@dataclass(frozen=True)
class _LinearLoss:
    """hidden: (B, T, D). weight: (V, D). labels: (B, T - skipped - trimmed), those of steps skipped … T - trimmed - 1."""

    hidden: fx.Node
    weight: fx.Node
    labels: fx.Node
    skipped: int
    trimmed: int


def _match(node: fx.Node) -> _LinearLoss | None:
    softmax: fx.Node = node.args[0]  # type: ignore[assignment]
    reduction = argument(node, "reduction")
    if softmax.target is not aten._log_softmax.default or argument(node, "weight") is not None or reduction not in (1, 2):
        return None
    if any(user.args[1] == 1 and user.users for user in node.users):
        return None
    product = _through(softmax.args[0], _is_same_logits)  # type: ignore[arg-type]
    if product.target is not aten.mm.default or product.args[1].target is not aten.t.default:  # type: ignore[union-attr]
        return None
    hidden = _through(product.args[0], _is_part)  # type: ignore[arg-type]
    labels = _through(node.args[1], _is_view)  # type: ignore[arg-type]
    h, y = hidden.meta["val"], labels.meta["val"]
    if h.ndim != 3 or y.ndim != 2 or h.shape[0] != y.shape[0]:
        return None
    skipped = _skipped(softmax.args[0], product, _is_same_logits) + _skipped(product.args[0], hidden, _is_part)  # type: ignore[arg-type]
    trimmed = _as_integer(h.shape[1] - y.shape[1] - skipped)
    if trimmed is None or trimmed < 0:
        return None
    return _LinearLoss(hidden, product.args[1].args[0], labels, skipped, trimmed)  # type: ignore[union-attr, arg-type]


def _skipped(node: fx.Node, end: fx.Node, accept: Callable[[fx.Node], bool]) -> int:
    """First step that the cuts along time between `end` and `node` leave."""
    start = 0
    while node is not end and accept(node):
        if node.target is aten.slice.Tensor:
            start += argument(node, "start") or 0
        node = node.args[0]  # type: ignore[assignment]
    return start


def _as_integer(size: int | torch.SymInt) -> int | None:
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_Integer else None


def _through(node: fx.Node, accept: Callable[[fx.Node], bool]) -> fx.Node:
    while node.op == "call_function" and accept(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS


def _is_part(node: fx.Node) -> bool:
    """A view, or steps start … of a (B, T, …) value."""
    if node.target is not aten.slice.Tensor:
        return _is_view(node)
    along_time = node.meta["val"].ndim == 3 and int(argument(node, "dim")) % 3 == 1 and argument(node, "step") == 1
    start = argument(node, "start") or 0
    return along_time and isinstance(start, int) and start >= 0


def _is_same_logits(node: fx.Node) -> bool:
    to_float = node.target is aten._to_copy.default and node.kwargs.get("dtype") is torch.float32
    return to_float or _is_part(node)


def _calls(graph: fx.Graph, *targets: object) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]
