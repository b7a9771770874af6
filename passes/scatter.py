"""Put a changed view back into the value it is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.aliasing import reads_part
from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten


def write_through(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    """`whole` with the part that `view` looks at replaced by `value`.

    view: a node of the traced graph (slice, select, transpose …). whole, value: nodes of the new graph. cause: the
    operation that writes, for its place in the source. Raises CaptureError for a view that cannot be written through.
    """
    inverse = _INVERSES.get(view.target)
    if inverse is None:
        through = "one of several views that one call made, which autograd refuses" if reads_part(view) else f"{view.target}"
        raise CaptureError(
            f"{cause.meta.get('where', 'the root module')}: {cause.target} writes through {through}; write to a new value instead"
        )
    return inverse(emit, view, whole, value, cause)


def _slice(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    dim, start, end, step = (argument(view, name) for name in ("dim", "start", "end", "step"))
    if value.meta["val"].shape == whole.meta["val"].shape:
        return value
    if any(isinstance(a, fx.Node) for a in (start, end, step)):
        raise CaptureError(f"{cause.meta.get('where', 'the root module')}: {cause.target} writes to a part of the sequence")
    return emit.call(cause, aten.slice_scatter.default, whole, value, dim, start, end, step)


def _select(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    index = argument(view, "index")
    if isinstance(index, fx.Node):
        raise CaptureError(f"{cause.meta.get('where', 'the root module')}: {cause.target} writes to one position of the sequence")
    return emit.call(cause, aten.select_scatter.default, whole, value, argument(view, "dim"), index)


def _diagonal(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    places = (argument(view, name) for name in ("offset", "dim1", "dim2"))
    return emit.call(cause, aten.diagonal_scatter.default, whole, value, *places)


def _view(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    return emit.call(cause, aten.reshape.default, value, emit.sizes(cause, whole))


def _same(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    return value


def _transpose(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    return emit.call(cause, view.target, value, *view.args[1:])


def _permute(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    ndim = whole.meta["val"].ndim
    order = [int(d) % ndim for d in argument(view, "dims")]
    return emit.call(cause, aten.permute.default, value, [order.index(d) for d in range(ndim)])


def _real(emit: Emitter, view: fx.Node, whole: fx.Node, value: fx.Node, cause: fx.Node) -> fx.Node:
    return emit.call(cause, aten.view_as_complex.default, value)


Inverse = Callable[[Emitter, fx.Node, fx.Node, fx.Node, fx.Node], fx.Node]
_INVERSES: dict[Any, Inverse] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.view.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.view_as_real.default: _real,
}
