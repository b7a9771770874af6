"""Rewrites of a traced graph that change no value: transposes that cancel, copies that only change strides, dead nodes, the fused loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.passes.carried import LINEAR_CROSS_ENTROPY
from adjcomp.passes.timerules import argument

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def clean(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph` after all rewrites of this file."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, mapping))
    for rewrite in (_plain_views, _drop_no_ops, _split_before_transpose, _drop_stride_copies, _cancel_transposes, fuse_cross_entropy):
        rewrite(copy)
        copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return copy


def tidy(graph: fx.Graph) -> fx.Graph:
    """A copy without dead nodes, detaches and pairs of transposes; unlike `clean` it changes no strides."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for rewrite in (_drop_detaches, _plain_views, _cancel_transposes):
        rewrite(copy)
        copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return copy


def _drop_detaches(graph: fx.Graph) -> None:
    for node in _calls(graph, aten.detach.default, aten.alias.default):
        _replace(node, node.args[0])


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def _plain_views(graph: fx.Graph) -> None:
    for node in _calls(graph, aten._unsafe_view.default):
        node.target = aten.view.default


def _drop_no_ops(graph: fx.Graph) -> None:
    """Slices that take everything, and detaches that nothing differentiates through (dead ones go with the dead code)."""
    for node in _calls(graph, aten.slice.Tensor):
        source, dim = node.args[0], argument(node, "dim")
        whole = argument(node, "start") in (0, None) and argument(node, "step") == 1
        if whole and node.meta["val"].shape[dim] == source.meta["val"].shape[dim] and _is_huge(argument(node, "end")):
            _replace(node, source)


def _is_huge(end: object) -> bool:
    return end is None or (isinstance(end, int) and end >= 2**62)


def _pair(node: fx.Node) -> tuple[int, int] | None:
    if node.op != "call_function" or node.target not in (aten.transpose.int, aten.t.default):
        return None
    if node.target is aten.t.default:
        return (0, 1)
    ndim = node.meta["val"].ndim
    a, b = (int(argument(node, name)) % ndim for name in ("dim0", "dim1"))
    return (min(a, b), max(a, b))


def _cancel_transposes(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        pair = _pair(node)
        source = node.args[0] if pair else None
        if pair and isinstance(source, fx.Node) and _pair(source) == pair:
            _replace(node, source.args[0])


def _split_before_transpose(graph: fx.Graph) -> None:
    """Split, then transpose the parts: models that put channels first transpose the parts back, and both transposes cancel."""
    for node in _calls(graph, aten.split.Tensor, aten.split_with_sizes.default):
        source = node.args[0]
        pair = _pair(source)
        if pair is None or source.target is not aten.transpose.int:
            continue
        dim = int(argument(node, "dim")) % source.meta["val"].ndim
        inner = source.args[0]
        swapped = {pair[0]: pair[1], pair[1]: pair[0]}.get(dim, dim)
        with graph.inserting_before(node):
            parts = graph.call_function(node.target, (inner, node.args[1], swapped))
            _copy_meta(parts, node, [v.transpose(*pair) for v in node.meta["val"]])
            for user in list(node.users):
                part = _getitem(graph, parts, user.args[1])
                back = graph.call_function(aten.transpose.int, (part, *pair))
                _copy_meta(back, user, user.meta["val"])
                _replace(user, back)


def _drop_stride_copies(graph: fx.Graph) -> None:
    """A contiguous copy of a transposed value is not needed where every use accepts any strides."""
    for node in _calls(graph, aten.clone.default):
        source = node.args[0]
        if _pair(source) and all(_accepts_any_strides(user, node) for user in node.users):
            _replace(node, source)


def _accepts_any_strides(user: fx.Node, value: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if getattr(user.target, "namespace", "") == "adjcomp" or torch.Tag.pointwise in getattr(user.target, "tags", ()):
        return True
    return _pair(user) is not None and all(_accepts_any_strides(next_user, user) for next_user in user.users)


def _through(node: fx.Node, accept: Callable[[fx.Node], bool]) -> fx.Node:
    while node.op == "call_function" and accept(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or node.target is aten.clone.default


def _is_view_or_float(node: fx.Node) -> bool:
    to_float = node.target is aten._to_copy.default and node.kwargs.get("dtype") is torch.float32
    return _is_view(node) or to_float


def fuse_cross_entropy(graph: fx.Graph) -> None:
    """`nll_loss(log_softmax(hidden @ weightᵀ))` becomes `linear_cross_entropy`, which never holds a (B, T, vocabulary) value."""
    for node in _calls(graph, aten.nll_loss_forward.default):
        match = _match_linear_loss(node)
        if match is None:
            continue
        hidden, weight, labels = match
        ignore_index = argument(node, "ignore_index")
        with graph.inserting_before(node):
            args = (hidden, weight, labels, ignore_index, None)
            fused = graph.call_function(LINEAR_CROSS_ENTROPY, args)
            _copy_meta(fused, node, LINEAR_CROSS_ENTROPY(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args)))
            total, count = (_getitem(graph, fused, i) for i in (0, 1))
            loss = total
            if argument(node, "reduction") == 1:
                loss = graph.call_function(aten.div.Tensor, (total, count))
                _copy_meta(loss, node, total.meta["val"].clone())
        for user in list(node.users):
            _replace(user, loss if user.args[1] == 0 else count)


def logits_of_losses(graph: fx.Graph) -> set[fx.Node]:
    """Every node that is, up to views and a cast to float32, the logits of a loss of the graph."""
    bases: set[fx.Node] = set()
    for node in _calls(graph, aten.nll_loss_forward.default):
        softmax = node.args[0]
        bases.add(_through(softmax.args[0], _is_view_or_float) if softmax.target is aten._log_softmax.default else softmax)  # type: ignore[union-attr, arg-type]
    heads = {(n.args[0], n.args[1]) for n in _calls(graph, LINEAR_CROSS_ENTROPY)}
    for node in _calls(graph, aten.mm.default):
        hidden, weight_t = node.args
        if weight_t.target is aten.t.default and (_through(hidden, _is_view), weight_t.args[0]) in heads:  # type: ignore[union-attr, arg-type]
            bases.add(node)
    return {n for n in graph.nodes if n.op == "call_function" and _through(n, _is_view_or_float) in bases}


def _match_linear_loss(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    softmax, target = node.args[0], node.args[1]
    weighted, reduction = argument(node, "weight"), argument(node, "reduction")
    if softmax.target is not aten._log_softmax.default or weighted is not None or reduction not in (1, 2):  # type: ignore[union-attr]
        return None
    if any(user.args[1] == 1 and user.users for user in node.users):
        return None
    logits = _through(softmax.args[0], _is_view_or_float)  # type: ignore[union-attr, arg-type]
    if logits.target is not aten.mm.default:
        return None
    hidden, weight_t = logits.args
    hidden_btd, labels = _through(hidden, _is_view), _through(target, _is_view)  # type: ignore[arg-type]
    if weight_t.target is not aten.t.default:  # type: ignore[union-attr]
        return None
    h, y = hidden_btd.meta["val"], labels.meta["val"]
    if h.ndim != 3 or y.ndim != 2 or h.shape[:2] != y.shape:
        return None
    return hidden_btd, weight_t.args[0], labels  # type: ignore[union-attr, return-value]


def _getitem(graph: fx.Graph, source: fx.Node, index: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (source, index))
    _copy_meta(node, source, source.meta["val"][index])
    return node


def _copy_meta(node: fx.Node, like: fx.Node, value: Any) -> None:
    node.meta.update({key: like.meta[key] for key in ("where", "no_grad") if key in like.meta}, val=value)
