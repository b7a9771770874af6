"""Convolutions along time that look back only, rewritten to `causal_conv1d`."""

from __future__ import annotations

import torch
from torch import fx

from adjcomp.passes.sites import CONV, Site, getitem, one_hot
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
# Of one value, and each step alone.
_STEPWISE = {
    aten.silu.default,
    aten.relu.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.clone.default,
    aten._to_copy.default,
}


def lower_convolution(site: Site) -> None:
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


def _padded(site: Site, x: fx.Node, padding: int) -> tuple[fx.Node, int]:
    """The value before F.pad, and how many steps stand before it."""
    if x.target is aten.constant_pad_nd.default and padding == 0 and (argument(x, "value") or 0) == 0:
        pad = list(x.args[1])  # type: ignore[arg-type]
        if len(pad) == 2 and isinstance(pad[0], int) and pad[0] >= 0:
            return x.args[0], pad[0]  # type: ignore[return-value]
    return x, padding


def _cut_to_length(site: Site, node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Users that cut a convolution's output to T steps, with the first step they take; the output itself where it has T."""
    if site.is_time(node.meta["val"].shape[2]):
        return [(node, 0)]
    _cut_at_once(site, node)
    found = []
    for user in node.users:
        along = user.target is aten.slice.Tensor and int(argument(user, "dim")) % 3 == 2 and argument(user, "step") == 1
        start = argument(user, "start") or 0 if along else None
        if along and isinstance(start, int) and start >= 0 and site.is_time(user.meta["val"].shape[2]):
            found.append((user, start))
    return found


def _cut_at_once(site: Site, node: fx.Node) -> None:
    """Move a cut along time up to the convolution, past what works on each step alone: act(conv(x).transpose(1, 2))[:, :T]."""
    chain: list[fx.Node] = []
    here, dim = node, 2
    while len(here.users) == 1:
        here = next(iter(here.users))
        if here.target is aten.slice.Tensor:
            break
        if here.target is aten.transpose.int:
            swapped = [int(d) % 3 for d in here.args[1:3]]  # type: ignore[arg-type]
            dim = swapped[1 - swapped.index(dim)] if dim in swapped else dim
        elif here.target not in _STEPWISE:
            return
        chain.append(here)
    if not chain or here.target is not aten.slice.Tensor or int(argument(here, "dim")) % 3 != dim:
        return

    def make() -> fx.Node:
        cut = site.call(aten.slice.Tensor, node, 2, *here.args[2:], **here.kwargs)
        for step in chain:
            cut = site.call(step.target, cut, *step.args[1:], **step.kwargs)
        return cut

    site.replace(here, make)
    for step in reversed(chain):
        site.graph.erase_node(step)


def _windowed(site: Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None, spread: int, delay: int, groups: int) -> fx.Node:
    """The convolution as causal_conv1d where each channel has its own weights, else as a product with an explicit window."""
    out_channels, per_group, width = weight.meta["val"].shape
    x_btd = site.call(aten.transpose.int, x, 1, 2)
    if per_group == 1 and out_channels == groups:
        taps = site.call(aten.select.int, weight, 1, 0)
        y = getitem(site, site.call(CONV, x_btd, _spread(site, taps, spread, delay), bias, None, False))
        return site.call(aten.transpose.int, y, 1, 2)
    value = x.meta["val"]
    steps = [delay + (width - 1 - w) * spread for w in range(width)]
    parts = [getitem(site, site.call(CONV, x_btd, one_hot(site, value.shape[1], s, value), None, None, False)) for s in steps]
    return site.call(aten.transpose.int, _products(site, parts, weight, bias, groups), 1, 2)


def _spread(site: Site, taps: fx.Node, spread: int, delay: int) -> fx.Node:
    """Weights (D, W) with spread - 1 zeros between them and `delay` zeros behind."""
    channels, width = taps.meta["val"].shape
    if spread > 1:
        apart = site.call(aten.unsqueeze.default, taps, 2)
        apart = site.call(aten.constant_pad_nd.default, apart, [0, spread - 1], 0.0)
        taps = site.call(aten.view.default, apart, [channels, width * spread])
        taps = site.call(aten.slice.Tensor, taps, 1, 0, (width - 1) * spread + 1)
    return site.call(aten.constant_pad_nd.default, taps, [0, delay], 0.0) if delay else taps


def _products(site: Site, parts: list[fx.Node], weight: fx.Node, bias: fx.Node | None, groups: int) -> fx.Node:
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
