"""Ways to look back a fixed number of steps, rewritten to `causal_conv1d`: convolutions, token shifts; and cumsum to
`linear_scan`.

As a carried op each keeps a short tail (or a running sum) at a chunk border instead of the whole sequence. Whatever is not
recognised
here stays as it is, and the time analysis names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument
from adjcomp.passes.timeaxis import product, time_factor

aten = torch.ops.aten
CONV = torch.ops.adjcomp.causal_conv1d.default
SCAN = torch.ops.adjcomp.linear_scan.default


def lower_windows(graph: fx.Graph, time: Any) -> None:
    """Rewrite `graph` in place; `time` is the symbol of the sequence length."""
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None and not node._erased:
            rewrite(_Site(graph, node, time))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


class _Site:
    """A node about to be rewritten."""

    def __init__(self, graph: fx.Graph, node: fx.Node, time: Any) -> None:
        self.graph, self.node, self.time = graph, node, time
        self.emit = Emitter(graph, set())

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit.call(self.node, target, *args, **kwargs)

    def is_time(self, size: Any) -> bool:
        return time_factor(size, self.time) == 1

    def time_dim(self, node: fx.Node) -> int | None:
        """The dimension of a float value whose size is T, where there is exactly one and it isn't the first."""
        value = node.meta["val"]
        found = [d for d, size in enumerate(value.shape) if time_factor(size, self.time) != 0]
        continuous = value.is_floating_point() or value.is_complex()
        return found[0] if continuous and len(found) == 1 and found[0] > 0 and self.is_time(value.shape[found[0]]) else None

    def replace(self, node: fx.Node, make: Callable[[], fx.Node]) -> None:
        """Put what `make` emits in the place of `node`."""
        with self.graph.inserting_before(node):
            made = make()
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)


def _getitem(site: _Site, node: fx.Node) -> fx.Node:
    made = site.graph.call_function(operator.getitem, (node, 0))
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    return made


def _delayed(site: _Site, x: fx.Node, dim: int, weight: fx.Node, bias: fx.Node | None, tail: fx.Node | None) -> fx.Node:
    """causal_conv1d of a value with time in dimension `dim` > 0 and batch in dimension 0; weight: (channels, W)."""
    moved = x if dim == 1 else site.call(aten.transpose.int, x, 1, dim)
    sizes = site.emit.sizes(site.node, moved)
    flat = moved
    if len(sizes) != 3:
        dense = site.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        flat = site.call(aten.view.default, dense, [sizes[0], sizes[1], product(moved.meta["val"].shape[2:])])
    y = _getitem(site, site.call(CONV, flat, weight, bias, tail, False))
    if len(sizes) != 3:
        y = site.call(aten.view.default, y, sizes)
    return y if dim == 1 else site.call(aten.transpose.int, y, 1, dim)


def _one_hot(site: _Site, channels: int, steps: int, like: torch.Tensor) -> fx.Node:
    """Weights (channels, steps + 1) that take the value `steps` steps ago."""
    options = {"dtype": like.dtype, "device": like.device}
    first = _full(site, [channels, 1], 1.0, options)
    return first if steps == 0 else site.call(aten.constant_pad_nd.default, first, [0, steps], 0.0)


def _full(site: _Site, sizes: list[Any], value: float, options: dict[str, Any]) -> fx.Node:
    made = site.graph.call_function(aten.full.default, (sizes, value), dict(options))
    mode = next(n.meta["val"].fake_mode for n in site.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    with mode:
        made.meta = {k: site.node.meta[k] for k in ("where", "no_grad") if k in site.node.meta} | {
            "val": torch.empty(sizes, **options)
        }
    return made


def _shift(site: _Site, x: fx.Node, dim: int, steps: int, fill: float, node: fx.Node) -> None:
    value = x.meta["val"]
    channels = product([s for d, s in enumerate(value.shape) if d not in (0, dim)])

    def make() -> fx.Node:
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        options = {"dtype": wide, "device": value.device}
        tail = None if fill == 0.0 else _full(site, [value.shape[0], steps, channels], fill, options)
        return _delayed(site, x, dim, _one_hot(site, channels, steps, value), None, tail)

    site.replace(node, make)


def _pad(site: _Site) -> None:
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


def _trimmed(site: _Site, node: fx.Node, dim: int) -> fx.Node | None:
    """x where `node` is x[:, :-k] along `dim`; whether k fits is seen from the size of what is made of it."""
    if node.target is not aten.slice.Tensor or int(argument(node, "dim")) % node.meta["val"].ndim != dim:
        return None
    from_first = argument(node, "start") in (0, None) and argument(node, "step") == 1
    return node.args[0] if from_first else None  # type: ignore[return-value]


def _cat(site: _Site) -> None:
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
        return _delayed(site, whole, dim, _one_hot(site, channels, steps, value), None, tail)

    site.replace(node, make)


def _convolution(site: _Site) -> None:
    """A 1-D convolution whose output is cut to the sequence's length so that it looks back only."""
    node = site.node
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    if value.ndim != 3 or transposed or list(stride) != [1]:  # type: ignore[arg-type]
        return
    source, before = _padded(site, x, int(padding[0]))  # type: ignore[arg-type, index]
    spread = int(dilation[0])  # type: ignore[index, arg-type]
    width = (weight.meta["val"].shape[2] - 1) * spread + 1  # type: ignore[union-attr]
    if not site.is_time(source.meta["val"].shape[2]):
        return
    for user, start in _cut_to_length(site, node):
        delay = before - start - (width - 1)
        if delay >= 0:
            site.replace(user, lambda delay=delay: _windowed(site, source, weight, bias, spread, delay, int(groups)))  # type: ignore[misc, arg-type]


def _padded(site: _Site, x: fx.Node, padding: int) -> tuple[fx.Node, int]:
    """The value before F.pad, and how many steps stand before it."""
    if x.target is aten.constant_pad_nd.default and padding == 0 and (argument(x, "value") or 0) == 0:
        pad = list(x.args[1])  # type: ignore[arg-type]
        if len(pad) == 2 and isinstance(pad[0], int) and pad[0] >= 0:
            return x.args[0], pad[0]  # type: ignore[return-value]
    return x, padding


def _cut_to_length(site: _Site, node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Users that cut a convolution's output to T steps, with the first step they take; the output itself where it has T."""
    if site.is_time(node.meta["val"].shape[2]):
        return [(node, 0)]
    found = []
    for user in node.users:
        along = user.target is aten.slice.Tensor and int(argument(user, "dim")) % 3 == 2 and argument(user, "step") == 1
        start = argument(user, "start") or 0 if along else None
        if along and isinstance(start, int) and start >= 0 and site.is_time(user.meta["val"].shape[2]):
            found.append((user, start))
    return found


def _windowed(site: _Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None, spread: int, delay: int, groups: int) -> fx.Node:
    """The convolution as causal_conv1d where each channel has its own weights, else as a product with an explicit window."""
    out_channels, per_group, width = weight.meta["val"].shape
    x_btd = site.call(aten.transpose.int, x, 1, 2)
    if per_group == 1 and out_channels == groups:
        taps = site.call(aten.select.int, weight, 1, 0)
        y = _getitem(site, site.call(CONV, x_btd, _spread(site, taps, spread, delay), bias, None, False))
        return site.call(aten.transpose.int, y, 1, 2)
    value = x.meta["val"]
    steps = [delay + (width - 1 - w) * spread for w in range(width)]
    parts = [_getitem(site, site.call(CONV, x_btd, _one_hot(site, value.shape[1], s, value), None, None, False)) for s in steps]
    return site.call(aten.transpose.int, _products(site, parts, weight, bias, groups), 1, 2)


def _spread(site: _Site, taps: fx.Node, spread: int, delay: int) -> fx.Node:
    """Weights (D, W) with spread - 1 zeros between them and `delay` zeros behind."""
    channels, width = taps.meta["val"].shape
    if spread > 1:
        apart = site.call(aten.unsqueeze.default, taps, 2)
        apart = site.call(aten.constant_pad_nd.default, apart, [0, spread - 1], 0.0)
        taps = site.call(aten.view.default, apart, [channels, width * spread])
        taps = site.call(aten.slice.Tensor, taps, 1, 0, (width - 1) * spread + 1)
    return site.call(aten.constant_pad_nd.default, taps, [0, delay], 0.0) if delay else taps


def _products(site: _Site, parts: list[fx.Node], weight: fx.Node, bias: fx.Node | None, groups: int) -> fx.Node:
    """Σ over taps and inputs: each group's window (B, T, inputs · W) times its weights."""
    out_channels, per_group, width = weight.meta["val"].shape
    window = site.call(aten.stack.default, parts, 3)
    sizes = site.emit.sizes(site.node, window)
    outputs = []
    for g in range(groups):
        part = window if groups == 1 else site.call(aten.slice.Tensor, window, 2, g * per_group, (g + 1) * per_group)
        dense = site.call(aten.clone.default, part, memory_format=torch.contiguous_format)
        flat = site.call(aten.view.default, dense, [-1, per_group * width])
        own = (
            weight
            if groups == 1
            else site.call(aten.slice.Tensor, weight, 0, g * out_channels // groups, (g + 1) * out_channels // groups)
        )
        matrix = site.call(aten.view.default, own, [out_channels // groups, per_group * width])
        product_ = site.call(aten.mm.default, flat, site.call(aten.t.default, matrix))
        outputs.append(site.call(aten.view.default, product_, [sizes[0], sizes[1], out_channels // groups]))
    y = outputs[0] if groups == 1 else site.call(aten.cat.default, outputs, 2)
    return y if bias is None else site.call(aten.add.Tensor, y, bias)


def _cumsum(site: _Site) -> None:
    """A running sum is a recurrence with decay one."""
    node = site.node
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    dim = int(argument(node, "dim")) % node.meta["val"].ndim
    if site.time_dim(x) != dim or argument(node, "dtype") not in (None, x.meta["val"].dtype):
        return

    def make() -> fx.Node:
        moved = x if dim == 1 else site.call(aten.transpose.int, x, 1, dim)
        h = _getitem(site, site.call(SCAN, site.call(aten.ones_like.default, moved), moved, None))
        return h if dim == 1 else site.call(aten.transpose.int, h, 1, dim)

    site.replace(node, make)


_REWRITES: dict[Any, Callable[[_Site], None]] = {
    aten.convolution.default: _convolution,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
}
