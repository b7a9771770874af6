"""Matrix products whose result is read in part: only the columns that are read are computed.

A projection makes several things at once (a gate beside what enters a recurrence), which the graph then splits. Where some of the
parts are dead, the weight is cut instead of the result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.passes.emitting import Emitter, fake_result
from adjcomp.passes.pruning import drop_dead
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
_WEIGHT = {aten.mm.default: 1, aten.addmm.default: 2}  # which argument of a product has its columns


@dataclass(frozen=True)
class _Read:
    """Columns start … stop - 1 of a value, as `node`."""

    node: fx.Node
    start: int
    stop: int


def narrow_products(graph: fx.Graph) -> None:
    """Rewrite in place; `graph` has no dead code, before and after."""
    for product in [n for n in graph.nodes if n.target in _WEIGHT]:
        whole = _shown(product)
        reads = _reads(whole)
        if reads is None:
            continue
        spans = _joined([(read.start, read.stop) for read in reads])
        if sum(stop - start for start, stop in spans) < whole.meta["val"].shape[-1]:
            changed = _cut(graph, product, whole, reads, spans)
            drop_dead(graph)
            _refresh(graph, changed)


def _shown(product: fx.Node) -> fx.Node:
    """The last of the views that show the rows of a product in another shape, each read by the next alone."""
    whole = product
    while len(whole.users) == 1:
        user = next(iter(whole.users))
        same = user.target is aten.view.default and user.meta["val"].shape[-1] == whole.meta["val"].shape[-1]
        if not same or user.meta["val"].ndim == 0:
            break
        whole = user
    return whole


def _reads(whole: fx.Node) -> list[_Read] | None:
    """What is read of the last dimension, by splits and slices; None where anything reads all of it."""
    width, last = whole.meta["val"].shape[-1], whole.meta["val"].ndim - 1
    found: list[_Read] = []
    for user in whole.users:
        if user.target in (aten.split.Tensor, aten.split_with_sizes.default) and _dim(user) == last:
            sizes = [part.shape[-1] for part in user.meta["val"]]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            for part in user.users:
                i = part.args[1]
                found.append(_Read(part, starts[i], starts[i] + sizes[i]))  # type: ignore[index, call-overload]
        elif user.target is aten.slice.Tensor and _dim(user) == last and argument(user, "step") == 1:
            start = argument(user, "start") or 0
            start = start if start >= 0 else max(0, start + width)
            found.append(_Read(user, start, start + user.meta["val"].shape[-1]))
        else:
            return None
    return found


def _dim(node: fx.Node) -> int:
    return int(argument(node, "dim")) % int(node.args[0].meta["val"].ndim)  # type: ignore[union-attr]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same columns in as few spans as possible, in order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _cut(graph: fx.Graph, product: fx.Node, whole: fx.Node, reads: list[_Read], spans: list[tuple[int, int]]) -> set[fx.Node]:
    """Give each span a product of its own; the nodes that took the place of what was read."""
    emit, changed = Emitter(graph, set()), set()
    for start, stop in spans:
        with graph.inserting_before(product):
            columns = _columns(product)
            args = [_slice(emit, product, a, start, stop) if i in columns else a for i, a in enumerate(product.args)]
            made = emit.call(product, product.target, *args, **product.kwargs)
            if whole is not product:
                made = emit.call(product, aten.view.default, made, [*whole.args[1][:-1], stop - start])  # type: ignore[index, misc]
        for read in reads:
            if start <= read.start and read.stop <= stop:
                with graph.inserting_before(read.node):
                    is_all = (read.start, read.stop) == (start, stop)
                    part = made if is_all else _slice(emit, read.node, made, read.start - start, read.stop - start)
                read.node.replace_all_uses_with(part)
                changed.add(part)
    return changed


def _slice(emit: Emitter, like: fx.Node, value: fx.Node, start: int, stop: int) -> fx.Node:
    """Columns of a value; rows of what it is the transpose of, so that the gradient of those is no transpose."""
    if value.target is aten.t.default:
        return emit.call(like, aten.t.default, _rows(emit, like, value.args[0], start, stop))  # type: ignore[arg-type]
    return emit.call(like, aten.slice.Tensor, value, -1, start, stop)


def _rows(emit: Emitter, like: fx.Node, value: fx.Node, start: int, stop: int) -> fx.Node:
    """Rows of a value; of one in another precision, those alone are converted."""
    if value.target is aten._to_copy.default and len(value.users) == 1:
        return emit.call(like, value.target, _rows(emit, like, value.args[0], start, stop), **value.kwargs)  # type: ignore[arg-type]
    return emit.call(like, aten.slice.Tensor, value, 0, start, stop)


def _columns(product: fx.Node) -> set[int]:
    """Arguments that have the columns of the result: the right factor, and what is added unless it is broadcast."""
    weight = _WEIGHT[product.target]
    added = weight == 2 and product.args[0].meta["val"].shape[-1] == product.meta["val"].shape[-1]  # type: ignore[union-attr]
    return {weight, 0} if added else {weight}


def _refresh(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Strides may be others below what has changed."""
    for node in graph.nodes:
        if node.op == "call_function" and node not in changed and any(a in changed for a in node.all_input_nodes):
            is_part = node.target is operator.getitem
            node.meta["val"] = (
                node.args[0].meta["val"][node.args[1]] if is_part else fake_result(node.target, node.args, node.kwargs)
            )
            changed.add(node)
