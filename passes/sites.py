"""A node of a traced graph that is about to be rewritten, and what rewrites of windows over time emit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timeaxis import product, time_factor

aten = torch.ops.aten
CONV = torch.ops.adjcomp.causal_conv1d.default


class Site:
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


def getitem(site: Site, node: fx.Node) -> fx.Node:
    made = site.graph.call_function(operator.getitem, (node, 0))
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    return made


def delayed(site: Site, x: fx.Node, dim: int, weight: fx.Node, bias: fx.Node | None, tail: fx.Node | None) -> fx.Node:
    """causal_conv1d of a value with time in dimension `dim` > 0 and batch in dimension 0; weight: (channels, W)."""
    moved = x if dim == 1 else site.call(aten.transpose.int, x, 1, dim)
    sizes = site.emit.sizes(site.node, moved)
    flat = moved
    if len(sizes) != 3:
        dense = site.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        flat = site.call(aten.view.default, dense, [sizes[0], sizes[1], product(moved.meta["val"].shape[2:])])
    y = getitem(site, site.call(CONV, flat, weight, bias, tail, False))
    if len(sizes) != 3:
        y = site.call(aten.view.default, y, sizes)
    return y if dim == 1 else site.call(aten.transpose.int, y, 1, dim)


def one_hot(site: Site, channels: int, steps: int, like: torch.Tensor) -> fx.Node:
    """Weights (channels, steps + 1) that take the value `steps` steps ago."""
    options = {"dtype": like.dtype, "device": like.device}
    first = full(site, [channels, 1], 1.0, options)
    return first if steps == 0 else site.call(aten.constant_pad_nd.default, first, [0, steps], 0.0)


def full(site: Site, sizes: list[Any], value: float, options: dict[str, Any]) -> fx.Node:
    made = site.graph.call_function(aten.full.default, (sizes, value), dict(options))
    mode = next(n.meta["val"].fake_mode for n in site.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    with mode:
        made.meta = {k: site.node.meta[k] for k in ("where", "no_grad") if k in site.node.meta} | {
            "val": torch.empty(sizes, **options)
        }
    return made
