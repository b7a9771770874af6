"""Rules of the time analysis for ops that make, move, cut and join dimensions; see `timerules`."""

from __future__ import annotations

import torch
from torch import fx

from adjcomp.passes.timearguments import aligned, argument, dims_of, moved
from adjcomp.passes.timeaxis import Layouts, NotLocalError, TimeContext, TimeLayout, product, shape_of, time_factor, value_of

aten = torch.ops.aten


def constant_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """full, zeros, empty …: the same at every t; time is where the symbol is."""
    found = [(d, time_factor(s, context.time)) for d, s in enumerate(shape_of(node))]
    timed = [(d, f) for d, f in found if f != 0]
    if len(timed) > 1 or any(f is None for _, f in timed):
        raise NotLocalError(f"{node.target} makes a value of shape {shape_of(node)}")
    return TimeLayout(timed[0][0], timed[0][1] or 1) if timed else None


def view_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if any(sum(time_factor(size, context.time) != 0 for size in shape) > 1 for shape in (before, after)):
        raise NotLocalError(f"a view from {before} to {after} has time in several dimensions")
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


def expand_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return constant_rule(context, node)
    return moved(layout, layout.dim + len(shape_of(node)) - len(shape_of(node.args[0])))


def _permuted(context: TimeContext, node: fx.Node, order: list[int]) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    return None if layout is None else moved(layout, order.index(layout.dim))


def permute_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    return _permuted(context, node, dims_of(node, "dims", len(shape_of(node.args[0]))))


def transpose_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    ndim = len(shape_of(node.args[0]))
    order = list(range(ndim))
    if node.target is aten.t.default:
        order.reverse()
    else:
        a, b = (int(argument(node, name)) % ndim for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return _permuted(context, node, order)


def unsqueeze_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % (len(shape_of(node.args[0])) + 1)
    return moved(layout, layout.dim + (dim <= layout.dim))


def squeeze_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    shape = shape_of(node.args[0])
    dims = range(len(shape)) if node.target is aten.squeeze.default else dims_of(node, "dim", len(shape))
    removed = [d for d in dims if isinstance(shape[d], int) and shape[d] == 1]
    return moved(layout, layout.dim - sum(d < layout.dim for d in removed))


def complex_view_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """view_as_real appends a dimension of two, view_as_complex removes it."""
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim == len(shape_of(node)):
        raise NotLocalError("it makes complex numbers of neighbours in time")
    return layout


def slice_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    dim = int(argument(node, "dim")) % len(shape_of(node.args[0]))
    if layout is not None and layout.dim == dim and shape_of(node)[dim] != shape_of(node.args[0])[dim]:
        raise NotLocalError("it takes a part of the sequence")
    if layout is not None and layout.dim == dim and argument(node, "start") not in (0, None):
        raise NotLocalError("it takes a part of the sequence")
    return layout if layout is not None else constant_rule(context, node)


def select_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % len(shape_of(node.args[0]))
    if dim == layout.dim:
        raise NotLocalError("it takes one position of the sequence")
    return moved(layout, layout.dim - (dim < layout.dim))


def scatter_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    """slice_scatter, select_scatter: a part of a value replaced."""
    layout, part = context.layout(node.args[0]), context.layout(node.args[1])
    dim = int(argument(node, "dim")) % len(shape_of(node))
    if layout is None or layout.dim == dim:
        raise NotLocalError("it writes to a part of the sequence")
    removed = node.target is aten.select_scatter.default and dim < layout.dim
    if part != moved(layout, layout.dim - removed):
        raise NotLocalError("it writes a value with another time axis")
    return layout


def split_rule(context: TimeContext, node: fx.Node) -> Layouts:
    layout = context.layout(node.args[0])
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node.args[0])):
        raise NotLocalError("it splits the sequence")
    return (layout,) * len(value_of(node))


def cat_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = aligned(context, node, list(node.args[0]))  # type: ignore[arg-type]
    if layout is not None and layout.dim == int(argument(node, "dim")) % len(shape_of(node)):
        raise NotLocalError("it concatenates along time")
    return layout


def stack_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layouts = {context.layout(tensor) for tensor in node.args[0]}  # type: ignore[union-attr]
    if len(layouts) != 1:
        raise NotLocalError("it stacks values with and without time")
    layout = layouts.pop()
    if layout is None:
        return None
    dim = int(argument(node, "dim")) % len(shape_of(node))
    return moved(layout, layout.dim + (dim <= layout.dim))


def pad_rule(context: TimeContext, node: fx.Node) -> TimeLayout | None:
    layout = context.layout(node.args[0])
    if layout is not None:
        pad, behind = list(node.args[1]), len(shape_of(node.args[0])) - 1 - layout.dim  # type: ignore[arg-type]
        if any(p != 0 for p in pad[2 * behind : 2 * behind + 2]):
            raise NotLocalError("it pads the sequence")
    return layout
