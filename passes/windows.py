"""Ways to look back a fixed number of steps, rewritten to `causal_conv1d`: convolutions, token shifts; cumsum to
`linear_scan`, and logcumsumexp to the op of that name.

As a carried op each keeps a short tail (or a running sum) at a chunk border instead of the whole sequence. Whatever is not
recognised here stays as it is, and the time analysis names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.passes.convolutions import lower_convolution
from adjcomp.passes.sites import Site, delayed, full, getitem, one_hot
from adjcomp.passes.timearguments import argument
from adjcomp.passes.timeaxis import product

aten = torch.ops.aten
SCAN = torch.ops.adjcomp.linear_scan.default
LOG_SUM = torch.ops.adjcomp.logcumsumexp.default


def lower_windows(graph: fx.Graph, time: Any) -> None:
    """Rewrite `graph` in place; `time` is the symbol of the sequence length."""
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None and not node._erased:
            rewrite(Site(graph, node, time))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _shift(site: Site, x: fx.Node, dim: int, steps: int, fill: float, node: fx.Node) -> None:
    value = x.meta["val"]
    channels = product([s for d, s in enumerate(value.shape) if d not in (0, dim)])

    def make() -> fx.Node:
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        options = {"dtype": wide, "device": value.device}
        tail = None if fill == 0.0 else full(site, [value.shape[0], steps, channels], fill, options)
        return delayed(site, x, dim, one_hot(site, channels, steps, value), None, tail)

    site.replace(node, make)


def _pad(site: Site) -> None:
    """F.pad by k on the left and -k on the right, or by k on the left of x[:, :-k]."""
    node = site.node
    source, pad = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    value = source.meta["val"]  # type: ignore[union-attr]
    dims = [value.ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] != 0 or pad[i + 1] != 0]
    if len(dims) != 1 or node.meta["val"].is_complex():
        return
    dim = dims[0]
    left, right = pad[2 * (value.ndim - 1 - dim) : 2 * (value.ndim - 1 - dim) + 2]
    whole = _trimmed(site, source, dim) if right == 0 else source  # type: ignore[arg-type]
    if whole is None or not isinstance(left, int) or left <= 0 or (right == 0) == (whole is source):
        return
    if site.time_dim(whole) == dim and site.is_time(node.meta["val"].shape[dim]):
        _shift(site, whole, dim, left, float(argument(node, "value") or 0.0), node)


def _trimmed(site: Site, node: fx.Node, dim: int) -> fx.Node | None:
    """x where `node` is x[:, :-k] along `dim`; whether k fits is seen from the size of what is made of it."""
    if node.target is not aten.slice.Tensor or int(argument(node, "dim")) % node.meta["val"].ndim != dim:
        return None
    from_first = argument(node, "start") in (0, None) and argument(node, "step") == 1
    return node.args[0] if from_first else None  # type: ignore[return-value]


def _cat(site: Site) -> None:
    """cat([first, x[:, :-k]]) along time: a shift whose tail is `first`."""
    node = site.node
    parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    if len(parts) != 2 or node.meta["val"].is_complex():
        return
    dim = int(argument(node, "dim")) % node.meta["val"].ndim
    first, steps = parts[0], parts[0].meta["val"].shape[dim]
    whole = _trimmed(site, parts[1], dim)
    if (
        whole is None
        or not isinstance(steps, int)
        or site.time_dim(whole) != dim
        or not site.is_time(node.meta["val"].shape[dim])
    ):
        return
    value = whole.meta["val"]
    channels = product([s for d, s in enumerate(value.shape) if d not in (0, dim)])

    def make() -> fx.Node:
        moved = first if dim == 1 else site.call(aten.transpose.int, first, 1, dim)
        dense = site.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        tail = site.call(aten.view.default, dense, [value.shape[0], steps, channels])
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        if value.dtype is not wide:
            tail = site.call(aten._to_copy.default, tail, dtype=wide)
        return delayed(site, whole, dim, one_hot(site, channels, steps, value), None, tail)

    site.replace(node, make)


def _cumsum(site: Site) -> None:
    """A running sum is a recurrence with decay one."""
    node = site.node
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    dim = int(argument(node, "dim")) % node.meta["val"].ndim
    if site.time_dim(x) != dim or argument(node, "dtype") not in (None, x.meta["val"].dtype):
        return

    def make() -> fx.Node:
        moved = x if dim == 1 else site.call(aten.transpose.int, x, 1, dim)
        h = getitem(site, site.call(SCAN, site.call(aten.ones_like.default, moved), moved, None))
        return h if dim == 1 else site.call(aten.transpose.int, h, 1, dim)

    site.replace(node, make)


def _logcumsumexp(site: Site) -> None:
    """A running log-sum-exp carries its last value."""
    node = site.node
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    dim = int(argument(node, "dim")) % node.meta["val"].ndim
    if site.time_dim(x) != dim or x.meta["val"].is_complex():
        return

    def make() -> fx.Node:
        moved = x if dim == 1 else site.call(aten.transpose.int, x, 1, dim)
        y = getitem(site, site.call(LOG_SUM, moved, None))
        y = y if y.meta["val"].dtype is x.meta["val"].dtype else site.call(aten._to_copy.default, y, dtype=x.meta["val"].dtype)
        return y if dim == 1 else site.call(aten.transpose.int, y, 1, dim)

    site.replace(node, make)


_REWRITES: dict[Any, Callable[[Site], None]] = {
    aten.convolution.default: lower_convolution,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
    aten.logcumsumexp.default: _logcumsumexp,
}
