"""The rules of `timeaxis`: one small function a family of ATen ops.

A rule returns the layout of each output, or raises NotLocalError where out[t] would need more than in[t].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from adjcomp.passes.timearguments import aligned, argument, dims_of, moved, tensor_arguments
from adjcomp.passes.timeaxis import (
    Layouts,
    Locality,
    NotLocalError,
    Rule,
    TimeContext,
    TimeLayout,
    shape_of,
    time_factor,
    value_of,
)
from adjcomp.passes.timeshapes import (
    cat_rule,
    complex_view_rule,
    constant_rule,
    expand_rule,
    pad_rule,
    permute_rule,
    scatter_rule,
    select_rule,
    slice_rule,
    split_rule,
    squeeze_rule,
    stack_rule,
    transpose_rule,
    unsqueeze_rule,
    view_rule,
)

aten = torch.ops.aten


def pointwise_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """Broadcasting: every time axis must fall on the same output dimension."""
    symbols: list[fx.Node] = []
    fx.map_arg(
        (node.args, node.kwargs), lambda a: symbols.append(a) if isinstance(value_of(a), torch.SymInt | torch.SymFloat) else None
    )
    if symbols:
        raise NotLocalError("the sequence length itself enters the arithmetic")
    return aligned(context, node, tensor_arguments(node))


def _like_first(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    return context.layout(node.args[0])


def _like_all(context: TimeContext, node: fx.Node) -> Layouts:
    return (context.layout(node.args[0]),) * len(value_of(node))


def _along(name: str) -> Rule:
    """Ops that work along one dimension and keep the shape (softmax, flip, cumsum, sort, gather, index_select, roll)."""

    def rule(context: TimeContext, node: fx.Node) -> Layouts:
        layout = context.layout(node.args[0])
        if layout is not None and layout.dim in dims_of(node, name, len(shape_of(node.args[0]))):
            raise NotLocalError(f"{node.target} works along time")
        value = value_of(node)
        return (layout,) * (1 if isinstance(value, torch.Tensor) else len(value))

    return rule


def _reduce(context: TimeContext, node: fx.Node) -> Layouts:
    """sum, mean, max, norm … over `dim`, with or without keepdim."""
    layout = context.layout(node.args[0])
    value = value_of(node)
    count = 1 if isinstance(value, torch.Tensor) else len(value)
    if layout is None:
        return (None,) * count
    ndim = len(shape_of(node.args[0]))
    names = {entry.name for entry in node.target._schema.arguments}  # type: ignore[union-attr]
    dims = dims_of(node, "dim", ndim) if "dim" in names else list(range(ndim))
    if layout.dim in dims:
        raise NotLocalError(f"{node.target} reduces over time")
    kept = bool(argument(node, "keepdim")) if "keepdim" in names else False
    return (moved(layout, layout.dim - (0 if kept else sum(d < layout.dim for d in dims))),) * count


def _matmul(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """mm, addmm, bmm, baddbmm: rows or columns may be time, the contraction may not."""
    added = node.target in (aten.addmm.default, aten.baddbmm.default)
    left, right = node.args[1:3] if added else node.args[:2]
    ndim = len(shape_of(left))
    of_left, of_right = context.layout(left), context.layout(right)
    if (of_left is not None and of_left.dim == ndim - 1) or (of_right is not None and of_right.dim == ndim - 2):
        raise NotLocalError("a matrix product contracts over time (attention, or a mixing of positions)")
    batched = [x for x in (of_left, of_right) if x is not None and ndim == 3 and x.dim == 0]
    if batched and (of_left != of_right):
        raise NotLocalError("a batched matrix product pairs time with something else")
    if batched:
        return batched[0]
    if of_left is not None and of_right is not None:
        raise NotLocalError(
            "a matrix product of two sequences pairs every position with every other (attention: written as "
            "F.scaled_dot_product_attention(…, is_causal=True) it is supported)"
        )
    layout = of_left or of_right
    extra = context.layout(node.args[0]) if added else None
    if extra is not None and (layout is None or moved(extra, extra.dim - len(shape_of(node.args[0])) + ndim) != layout):
        raise NotLocalError("the added term of a matrix product has another time axis")
    return layout


def _scaled_dot_product(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """Causal attention over time is an op of ours by now."""
    raise NotLocalError(
        "attention over time that isn't causal, or has a mask of its own: F.scaled_dot_product_attention with is_causal=True "
        "and without attn_mask is supported"
    )


def _embedding(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    if context.layout(node.args[0]) is not None:
        raise NotLocalError("the table of an embedding depends on time")
    return context.layout(node.args[1])


def _layer_norm(context: TimeContext, node: fx.Node) -> Layouts:
    layout = context.layout(node.args[0])
    normalized = len(node.args[1])  # type: ignore[arg-type]
    if layout is not None and layout.dim >= len(shape_of(node.args[0])) - normalized:
        raise NotLocalError("it normalises over time")
    value = value_of(node)
    return (layout,) * (1 if isinstance(value, torch.Tensor) else len(value))


def _rms_norm(context: TimeContext, node: fx.Node) -> Layouts:
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim == len(shape_of(node.args[0])) - 1:
        raise NotLocalError("it normalises over time")
    return (layout, layout)


def _log_sigmoid(context: TimeContext, node: fx.Node) -> Layouts:
    """Its second output is a buffer of the same shape, or an empty one, by device."""
    layout = context.layout(node.args[0])
    return (layout, layout if value_of(node)[1].ndim == value_of(node)[0].ndim else None)


def _group_norm(context: TimeContext, node: fx.Node) -> Layouts:
    """Every row is normalised by itself, over its channels and all that follows them."""
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim > 0:
        raise NotLocalError("it normalises over time")
    return (layout, layout, layout)


def _convolution(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """Time among the rows is fine; a convolution along time that only looks back has been rewritten before."""
    if context.layout(node.args[1]) is not None:
        raise NotLocalError("the weights of a convolution depend on time")
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim > 0:
        raise NotLocalError("a convolution along time that looks ahead, or whose output isn't cut to the sequence's length")
    return layout


def _batch_norm(context: TimeContext, node: fx.Node) -> Layouts:
    """With the statistics of the sequence it mixes time; with running ones it is pointwise, channels in dimension 1."""
    layout = context.layout(node.args[0])
    if node.target is not aten._native_batch_norm_legit_no_training.default and argument(node, "training"):
        raise NotLocalError("batch statistics are taken over the whole sequence")
    if layout is not None and layout.dim == 1:
        raise NotLocalError("its channels are time")
    return (layout, None, None)


def _index_select(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    if context.layout(node.args[2]) is not None:
        raise NotLocalError("it selects by an index that depends on time")
    layouts = _along("dim")(context, node)
    return layouts[0] if isinstance(layouts, tuple) else layouts


def _gather(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = aligned(context, node, tensor_arguments(node))
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node)):
        raise NotLocalError("it gathers along time")
    if layout is not None and any(context.layout(a) is None for a in tensor_arguments(node)):
        raise NotLocalError("it gathers from values with and without time")
    return layout


def _grouped(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """Rows may be time, with one group each; the matrices may not."""
    x, weight, group = (context.layout(node.args[i]) for i in range(3))
    if weight is not None or (x is not None and x.dim == 1) or x != group:
        raise NotLocalError("a grouped product whose rows and groups do not line up in time")
    return x


def carried_rule(context: TimeContext, node: fx.Node) -> tuple[Locality, Layouts]:
    """`adjcomp.ops`: time is dimension 1 of every sequence argument and of the first output; the state has no time."""
    for tensor in tensor_arguments(node):
        layout = context.layout(tensor)
        if layout is not None and layout != TimeLayout(1):
            raise NotLocalError(f"{node.target} wants time in dimension 1 of every sequence")
    values = value_of(node)
    outputs = values if isinstance(values, tuple | list) else (values,)
    return Locality.CARRIED, tuple(_first_time(context, v) for v in outputs)


def _first_time(context: TimeContext, value: torch.Tensor) -> TimeLayout | None:
    return TimeLayout(1) if value.ndim > 1 and time_factor(value.shape[1], context.time) == 1 else None


def _packets(rule: Rule, *names: str) -> dict[Any, Rule]:
    return {getattr(aten, name): rule for name in names}


RULES: dict[Any, Rule] = {
    **_packets(
        pointwise_rule, "complex", "polar", "hardswish", "_prelu_kernel", "masked_fill", "rsub", "floor_divide", "isclose"
    ),
    **_packets(_log_sigmoid, "log_sigmoid_forward"),
    **_packets(_group_norm, "native_group_norm"),
    **_packets(_like_first, "clone", "detach", "alias", "lift_fresh_copy", "bernoulli"),
    **_packets(_like_first, "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "_to_copy"),
    **_packets(_like_first, "_conj", "_neg_view", "resolve_conj", "resolve_neg", "fill"),
    **_packets(_like_all, "native_dropout"),
    **_packets(complex_view_rule, "view_as_real", "view_as_complex"),
    **_packets(
        constant_rule,
        "rand",
        "randn",
        "full",
        "zeros",
        "ones",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "scalar_tensor",
    ),
    **_packets(view_rule, "view", "_unsafe_view", "reshape"),
    **_packets(expand_rule, "expand"),
    **_packets(permute_rule, "permute"),
    **_packets(transpose_rule, "transpose", "t"),
    **_packets(unsqueeze_rule, "unsqueeze"),
    **_packets(squeeze_rule, "squeeze"),
    **_packets(slice_rule, "slice"),
    **_packets(select_rule, "select"),
    **_packets(_along("dim"), "_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "glu"),
    **_packets(_along("dims"), "flip", "roll"),
    **_packets(_reduce, "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "logsumexp", "prod", "any", "all"),
    **_packets(_reduce, "linalg_vector_norm", "argmax", "argmin", "norm", "count_nonzero"),
    **_packets(scatter_rule, "slice_scatter", "select_scatter"),
    **_packets(split_rule, "split", "split_with_sizes", "unbind"),
    **_packets(cat_rule, "cat"),
    **_packets(stack_rule, "stack"),
    **_packets(_matmul, "mm", "addmm", "bmm", "baddbmm"),
    **_packets(_scaled_dot_product, *(f"_scaled_dot_product_{kind}attention" for kind in ("flash_", "efficient_", "cudnn_"))),
    **_packets(_scaled_dot_product, "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
    **_packets(_embedding, "embedding"),
    **_packets(_layer_norm, "native_layer_norm", "_fused_rms_norm", "rms_norm"),
    torch.ops.adjcomp.rms_norm: _rms_norm,
    **_packets(_batch_norm, "native_batch_norm", "_native_batch_norm_legit_no_training"),
    **_packets(_convolution, "convolution"),
    **_packets(pad_rule, "constant_pad_nd"),
    **_packets(_index_select, "index_select"),
    **_packets(_gather, "gather", "scatter"),
    torch.ops.adjcomp.grouped_linear: _grouped,
}
