"""The rules of `timeaxis`: one small function a family of ATen ops.

A rule returns the layout of each output, or raises NotLocalError where out[t] would need more than in[t].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from adjcomp.passes.timeaxis import Layouts, Locality, NotLocalError, Rule, TimeContext, TimeLayout, product, shape_of, time_factor, value_of

aten = torch.ops.aten


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of an ATen call, positional, by keyword or by default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for position, entry in enumerate(schema):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, entry.default_value)
    raise KeyError(f"{node.target} has no argument {name}")


def _dims(node: fx.Node, name: str, ndim: int) -> list[int]:
    value = argument(node, name)
    dims = [value] if isinstance(value, int) else list(value or range(ndim))
    return [dim % ndim for dim in dims]


def _moved(layout: TimeLayout, dim: int) -> TimeLayout:
    return TimeLayout(dim, layout.outer, layout.inner)


def _tensor_arguments(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda a: found.append(a))
    return [a for a in found if isinstance(value_of(a), torch.Tensor)]


def pointwise_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """Broadcasting: every time axis must fall on the same output dimension."""
    symbols: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda a: symbols.append(a) if isinstance(value_of(a), torch.SymInt | torch.SymFloat) else None)
    if symbols:
        raise NotLocalError("the sequence length itself enters the arithmetic")
    return _aligned(context, node, _tensor_arguments(node))


def _aligned(context: TimeContext, node: fx.Node, tensors: list[fx.Node]) -> TimeLayout | None:
    ndim = len(shape_of(node)) if isinstance(value_of(node), torch.Tensor) else max(len(shape_of(t)) for t in tensors)
    found: set[TimeLayout] = set()
    for tensor in tensors:
        layout = context.layout(tensor)
        if layout is not None:
            found.add(_moved(layout, layout.dim - len(shape_of(tensor)) + ndim))
    if len(found) > 1:
        raise NotLocalError(f"{node.target} combines values whose time axes do not line up")
    return found.pop() if found else None


def _like_first(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    return context.layout(node.args[0])


def _like_all(context: TimeContext, node: fx.Node) -> Layouts:
    return (context.layout(node.args[0]),) * len(value_of(node))


def _constant(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """full, zeros, empty …: the same at every t; time is where the symbol is."""
    found = [(d, time_factor(s, context.time)) for d, s in enumerate(shape_of(node))]
    timed = [(d, f) for d, f in found if f != 0]
    if len(timed) > 1 or any(f is None for _, f in timed):
        raise NotLocalError(f"{node.target} makes a value of shape {shape_of(node)}")
    return TimeLayout(timed[0][0], timed[0][1] or 1) if timed else None


def _view(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    right = layout.inner * product(before[layout.dim + 1 :])
    for dim, size in enumerate(after):
        factor = time_factor(size, context.time)
        if factor:
            behind = product(after[dim + 1 :])
            inner, rest = divmod(right, behind)
            if rest or inner == 0 or factor % inner:
                break
            return TimeLayout(dim, factor // inner, inner)
    raise NotLocalError(f"a view from {before} to {after} splits time")


def _expand(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return _constant(context, node)
    return _moved(layout, layout.dim + len(shape_of(node)) - len(shape_of(node.args[0])))


def _permuted(context: TimeContext, node: fx.Node, order: list[int]) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    return None if layout is None else _moved(layout, order.index(layout.dim))


def _permute(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    return _permuted(context, node, _dims(node, "dims", len(shape_of(node.args[0]))))


def _transpose(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    ndim = len(shape_of(node.args[0]))
    order = list(range(ndim))
    if node.target is aten.t.default:
        order.reverse()
    else:
        a, b = (int(argument(node, name)) % ndim for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return _permuted(context, node, order)


def _unsqueeze(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % (len(shape_of(node.args[0])) + 1)
    return _moved(layout, layout.dim + (dim <= layout.dim))


def _squeeze(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    shape = shape_of(node.args[0])
    dims = range(len(shape)) if node.target is aten.squeeze.default else _dims(node, "dim", len(shape))
    removed = [d for d in dims if isinstance(shape[d], int) and shape[d] == 1]
    return _moved(layout, layout.dim - sum(d < layout.dim for d in removed))


def _complex_view(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """view_as_real appends a dimension of two, view_as_complex removes it."""
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim == len(shape_of(node)):
        raise NotLocalError("it makes complex numbers of neighbours in time")
    return layout


def _slice(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    dim = int(argument(node, "dim")) % len(shape_of(node.args[0]))
    if layout is not None and layout.dim == dim and shape_of(node)[dim] != shape_of(node.args[0])[dim]:
        raise NotLocalError("it takes a part of the sequence")
    if layout is not None and layout.dim == dim and argument(node, "start") not in (0, None):
        raise NotLocalError("it takes a part of the sequence")
    return layout if layout is not None else _constant(context, node)


def _select(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % len(shape_of(node.args[0]))
    if dim == layout.dim:
        raise NotLocalError("it takes one position of the sequence")
    return _moved(layout, layout.dim - (dim < layout.dim))


def _along(name: str) -> Rule:
    """Ops that work along one dimension and keep the shape (softmax, flip, cumsum, sort, gather, index_select, roll)."""

    def rule(context: TimeContext, node: fx.Node) -> Layouts:
        layout = context.layout(node.args[0])
        if layout is not None and layout.dim in _dims(node, name, len(shape_of(node.args[0]))):
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
    dims = _dims(node, "dim", ndim) if "dim" in names else list(range(ndim))
    if layout.dim in dims:
        raise NotLocalError(f"{node.target} reduces over time")
    kept = bool(argument(node, "keepdim")) if "keepdim" in names else False
    return (_moved(layout, layout.dim - (0 if kept else sum(d < layout.dim for d in dims))),) * count


def _scatter(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """slice_scatter, select_scatter: a part of a value replaced."""
    layout, part = context.layout(node.args[0]), context.layout(node.args[1])
    dim = int(argument(node, "dim")) % len(shape_of(node))
    if layout is None or layout.dim == dim:
        raise NotLocalError("it writes to a part of the sequence")
    removed = node.target is aten.select_scatter.default and dim < layout.dim
    if part != _moved(layout, layout.dim - removed):
        raise NotLocalError("it writes a value with another time axis")
    return layout


def _split(context: TimeContext, node: fx.Node) -> Layouts:
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node.args[0])):
        raise NotLocalError("it splits the sequence")
    return (layout,) * len(value_of(node))


def _cat(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = _aligned(context, node, list(node.args[0]))  # type: ignore[arg-type]
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node)):
        raise NotLocalError("it concatenates along time")
    return layout


def _stack(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layouts = {context.layout(tensor) for tensor in node.args[0]}  # type: ignore[union-attr]
    if len(layouts) != 1:
        raise NotLocalError("it stacks values with and without time")
    layout = layouts.pop()
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % len(shape_of(node))
    return _moved(layout, layout.dim + (dim <= layout.dim))


def _matmul(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """mm, addmm, bmm, baddbmm: rows or columns may be time, the contraction may not."""
    added = node.target in (aten.addmm.default, aten.baddbmm.default)
    left, right = node.args[1:3] if added else node.args[:2]
    ndim = len(shape_of(left))
    of_left, of_right = context.layout(left), context.layout(right)
    if of_left is not None and of_left.dim == ndim - 1 or of_right is not None and of_right.dim == ndim - 2:
        raise NotLocalError("a matrix product contracts over time (attention, or a mixing of positions)")
    batched = [x for x in (of_left, of_right) if x is not None and ndim == 3 and x.dim == 0]
    if batched and (of_left != of_right):
        raise NotLocalError("a batched matrix product pairs time with something else")
    if batched:
        return batched[0]
    if of_left is not None and of_right is not None:
        raise NotLocalError("a matrix product of two sequences pairs every position with every other (attention)")
    layout = of_left or of_right
    extra = context.layout(node.args[0]) if added else None
    if extra is not None and (layout is None or _moved(extra, extra.dim - len(shape_of(node.args[0])) + ndim) != layout):
        raise NotLocalError("the added term of a matrix product has another time axis")
    return layout


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


def _pad(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is not None:
        pad, behind = list(node.args[1]), len(shape_of(node.args[0])) - 1 - layout.dim  # type: ignore[arg-type]
        if any(p != 0 for p in pad[2 * behind : 2 * behind + 2]):
            raise NotLocalError("it pads the sequence")
    return layout


def _index_select(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    if context.layout(node.args[2]) is not None:
        raise NotLocalError("it selects by an index that depends on time")
    layouts = _along("dim")(context, node)
    return layouts[0] if isinstance(layouts, tuple) else layouts


def _gather(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = _aligned(context, node, _tensor_arguments(node))
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node)):
        raise NotLocalError("it gathers along time")
    if layout is not None and any(context.layout(a) is None for a in _tensor_arguments(node)):
        raise NotLocalError("it gathers from values with and without time")
    return layout


def carried_rule(context: TimeContext, node: fx.Node) -> tuple[Locality, Layouts]:
    """`adjcomp.ops`: time is dimension 1 of every sequence argument and of the first output; the state has no time."""
    for tensor in _tensor_arguments(node):
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
    **_packets(_like_first, "clone", "detach", "alias", "lift_fresh_copy", "bernoulli"),
    **_packets(_like_first, "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "_to_copy"),
    **_packets(_like_first, "_conj", "_neg_view", "resolve_conj", "resolve_neg", "fill"),
    **_packets(_like_all, "native_dropout"),
    **_packets(_complex_view, "view_as_real", "view_as_complex"),
    **_packets(_constant, "rand", "randn", "full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"),
    **_packets(_view, "view", "_unsafe_view", "reshape"),
    **_packets(_expand, "expand"),
    **_packets(_permute, "permute"),
    **_packets(_transpose, "transpose", "t"),
    **_packets(_unsqueeze, "unsqueeze"),
    **_packets(_squeeze, "squeeze"),
    **_packets(_slice, "slice"),
    **_packets(_select, "select"),
    **_packets(_along("dim"), "_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "glu"),
    **_packets(_along("dims"), "flip", "roll"),
    **_packets(_reduce, "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "logsumexp", "prod", "any", "all"),
    **_packets(_reduce, "linalg_vector_norm", "argmax", "argmin", "norm", "count_nonzero"),
    **_packets(_scatter, "slice_scatter", "select_scatter"),
    **_packets(_split, "split", "split_with_sizes", "unbind"),
    **_packets(_cat, "cat"),
    **_packets(_stack, "stack"),
    **_packets(_matmul, "mm", "addmm", "bmm", "baddbmm"),
    **_packets(_embedding, "embedding"),
    **_packets(_layer_norm, "native_layer_norm", "_fused_rms_norm", "rms_norm"),
    **_packets(_batch_norm, "native_batch_norm", "_native_batch_norm_legit_no_training"),
    **_packets(_convolution, "convolution"),
    **_packets(_pad, "constant_pad_nd"),
    **_packets(_index_select, "index_select"),
    **_packets(_gather, "gather"),
}
