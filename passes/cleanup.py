"""Rewrites of a traced graph that change no value: transposes that cancel, copies that only change strides, dead nodes, the
fused loss.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.emitting import Emitter, fake_result
from adjcomp.passes.inplace import out_of_place
from adjcomp.passes.layouts import weights_on_the_right
from adjcomp.passes.losses import fuse_cross_entropy
from adjcomp.passes.norms import fuse_rms_norms
from adjcomp.passes.timearguments import argument
from adjcomp.passes.timeaxis import time_factor
from adjcomp.passes.windows import lower_windows

aten = torch.ops.aten


def clean(graph: fx.Graph, time: Any) -> fx.Graph:
    """A copy of `graph` after all rewrites of this file and of `windows`; `time` is the symbol of the sequence length."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    rewrites = (
        _plain_views,
        _drop_no_ops,
        partial(_constants_by_shape, time=time),
        _constant_batch_norm,
        partial(lower_windows, time=time),
        _split_before_transpose,
        weights_on_the_right,
        _drop_same_views,
        _drop_stride_copies,
        _cancel_transposes,
        fuse_cross_entropy,
        fuse_rms_norms,
        refresh,
    )
    for rewrite in rewrites:
        rewrite(copy)
        copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return copy


def refresh(graph: fx.Graph) -> None:
    """Fake values anew after rewrites that change strides; a view that no longer is one gets a copy first."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not _has_values(node):
            continue
        if node.target in _PRODUCTS:
            _check_product(node)
        if node.target is aten.view.default and not _can_view(node):
            with graph.inserting_before(node):
                dense = graph.call_function(aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format})
            _copy_meta(dense, node, fake_result(dense.target, dense.args, dense.kwargs))
            node.update_arg(0, dense)
        try:
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs)
        except (RuntimeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CaptureError(f"{node.meta.get('where', 'the root module')}: {node.target}: {reason}") from error


_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def _check_product(node: fx.Node) -> None:
    """Fake tensors multiply across dtypes, real ones don't: an integer input where floats are needed is found here."""
    left, right = (a.meta["val"].dtype for a in node.args[_PRODUCTS[node.target] :][:2])  # type: ignore[union-attr, index]
    if left is not right:
        raise CaptureError(f"{node.meta.get('where', 'the root module')}: a matrix product of dtypes {left} and {right}")


def _has_values(node: fx.Node) -> bool:
    """Whether a node makes tensors from tensors; sizes, and what is made from sizes alone, have no strides to change."""
    kinds = (torch.Tensor, tuple, list)
    return isinstance(node.meta.get("val"), kinds) and any(isinstance(a.meta.get("val"), kinds) for a in node.all_input_nodes)


def _can_view(node: fx.Node) -> bool:
    try:
        fake_result(node.target, node.args, node.kwargs)
    except (RuntimeError, ValueError):
        return False
    return True


_FILLS: dict[Any, float | None] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}


def _constants_by_shape(graph: fx.Graph, time: Any) -> None:
    """zeros_like and its kin depend on a shape, not on the value that has it."""
    for node in _calls(graph, *_FILLS):
        source, value = node.args[0], node.meta["val"]
        like = "_like" in str(node.target)
        if not all(time_factor(size, time) in (0, 1) for size in value.shape) or (
            like and value.shape != source.meta["val"].shape
        ):
            continue
        fill = _FILLS[node.target]
        number = argument(node, "fill_value") if fill is None else fill
        emit = Emitter(graph, set())
        with graph.inserting_before(node):
            sizes = emit.sizes(node, source) if like else node.args[1]
            made = graph.call_function(aten.full.default, (sizes, number), {"dtype": value.dtype, "device": value.device})
        _copy_meta(made, node, value)
        _replace(node, made)


def _constant_batch_norm(graph: fx.Graph) -> None:
    """Batch norm with running statistics is a scale and a shift by channel (dimension 1)."""
    for node in _calls(graph, aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default):
        if node.target is aten.native_batch_norm.default and argument(node, "training"):
            continue
        x, weight, bias, mean, var = node.args[:5]
        emit = Emitter(graph, set())
        ones = [1] * (x.meta["val"].ndim - 2)  # type: ignore[union-attr]
        with graph.inserting_before(node):
            std = emit.call(node, aten.sqrt.default, emit.call(node, aten.add.Tensor, var, argument(node, "eps")))
            scale = emit.call(node, aten.reciprocal.default, std)
            scale = scale if weight is None else emit.call(node, aten.mul.Tensor, scale, weight)
            shift = emit.call(node, aten.mul.Tensor, mean, scale)
            shift = emit.call(node, aten.neg.default, shift) if bias is None else emit.call(node, aten.sub.Tensor, bias, shift)
            scale, shift = (emit.call(node, aten.view.default, v, [-1, *ones]) for v in (scale, shift))
            y = emit.call(node, aten.add.Tensor, emit.call(node, aten.mul.Tensor, x, scale), shift)
        for user in list(node.users):
            if user.args[1] == 0:
                _replace(user, y)


def tidy(graph: fx.Graph) -> fx.Graph:
    """A functional copy without dead nodes, detaches and pairs of transposes; unlike `clean` it changes no strides."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    _drop_detaches(copy)
    out_of_place(copy)  # before anything is taken for dead: a write has effects
    for rewrite in (_plain_views, _cancel_transposes):
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
        if argument(node, "step") == 1 and _same_size(node.meta["val"].shape[dim], source.meta["val"].shape[dim]):
            _replace(node, source)


def _drop_same_views(graph: fx.Graph) -> None:
    """Views with the shape of what they show."""
    for node in _calls(graph, aten.view.default):
        if node.meta["val"].shape == node.args[0].meta["val"].shape:
            _replace(node, node.args[0])


def _same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal at every length: x[:, -T:] and x[:, :2**63] of T steps take everything, x[:, :4096] may not."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


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


def _getitem(graph: fx.Graph, source: fx.Node, index: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (source, index))
    _copy_meta(node, source, source.meta["val"][index])
    return node


def _copy_meta(node: fx.Node, like: fx.Node, value: Any) -> None:
    node.meta.update({key: like.meta[key] for key in ("where", "no_grad") if key in like.meta}, val=value)
