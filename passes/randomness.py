"""Random ops inside tiles, rewritten to counter-based ones: each number depends on (step seed, layer, op, batch, time, channel)
only.

So a mask is the same whatever the chunk length, budget, placement or number of recomputations, and nothing need be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.carried import COUNTER_UNIFORM
from adjcomp.passes.timeaxis import TimeLayout

aten = torch.ops.aten


@dataclass(frozen=True)
class Draw:
    """Where a tile's random op draws from: the seed and offset placeholders, its number within the tile, where time is."""

    graph: fx.Graph
    seed: fx.Node
    offset: fx.Node
    number: int
    layout: TimeLayout
    value: torch.Tensor  # the traced result (the first output)
    meta: dict[str, Any]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node whose fake value is computed from its arguments."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda a: a.meta["val"])
        with self.value.fake_mode:  # type: ignore[attr-defined]
            node.meta = {**self.meta, "val": target(*values[0], **values[1])}
        return node

    def uniform(self, shape: list[Any], part: int = 0) -> fx.Node:
        """float32 uniforms of the result's shape; `part` separates several draws of one op."""
        return self.call(
            COUNTER_UNIFORM, self.seed, 2 * self.number + part, shape, self.layout.dim, self.offset, self.layout.outer
        )


def _dropout(draw: Draw, node: fx.Node, fetch: Callable[[Any], Any], shape: list[Any]) -> fx.Node:
    """native_dropout(x, p, train) -> (x · mask / (1 - p), mask)."""
    x, p, train = fetch(node.args[0]), float(node.args[1]), node.args[2]  # type: ignore[arg-type]
    if train is False or p == 0.0:
        return draw.call(pair, x, draw.call(aten.ones_like.default, x, dtype=torch.bool))
    mask = draw.call(aten.ge.Scalar, draw.uniform(shape), p)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return draw.call(pair, draw.call(aten.mul.Tensor, draw.call(aten.mul.Tensor, x, mask), scale), mask)


def pair(first: Any, second: Any) -> tuple[Any, Any]:
    """Stands for a two-output op; reads of it are resolved while the tile is built."""
    return (first, second)


def _rand(draw: Draw, node: fx.Node, fetch: Callable[[Any], Any], shape: list[Any]) -> fx.Node:
    return draw.call(aten._to_copy.default, draw.uniform(shape), dtype=draw.value.dtype)


def _randn(draw: Draw, node: fx.Node, fetch: Callable[[Any], Any], shape: list[Any]) -> fx.Node:
    """Box–Muller: sqrt(-2 log(1 - u)) cos(2π v)."""
    one_minus = draw.call(aten.rsub.Scalar, draw.uniform(shape), 1.0)
    radius = draw.call(aten.sqrt.default, draw.call(aten.mul.Tensor, draw.call(aten.log.default, one_minus), -2.0))
    angle = draw.call(aten.cos.default, draw.call(aten.mul.Tensor, draw.uniform(shape, 1), 2.0 * math.pi))
    return draw.call(aten._to_copy.default, draw.call(aten.mul.Tensor, radius, angle), dtype=draw.value.dtype)


def _bernoulli(draw: Draw, node: fx.Node, fetch: Callable[[Any], Any], shape: list[Any]) -> fx.Node:
    if node.target is aten.bernoulli.p:
        chosen = draw.call(aten.lt.Scalar, draw.uniform(shape), float(node.args[1]))  # type: ignore[arg-type]
    else:
        chosen = draw.call(aten.lt.Tensor, draw.uniform(shape), fetch(node.args[0]))
    return draw.call(aten._to_copy.default, chosen, dtype=draw.value.dtype)


REWRITES: dict[Any, Callable[[Draw, fx.Node, Callable[[Any], Any], list[Any]], fx.Node]] = {
    aten.native_dropout.default: _dropout,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from the global generator."""
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_random(node: fx.Node, where: str) -> None:
    """CaptureError for a random op that has no counter-based form."""
    if node.target not in REWRITES:
        known = sorted(str(target).removeprefix("aten.") for target in REWRITES)
        raise CaptureError(f"{where}: random op {node.target} has no counter-based form; supported: {', '.join(known)}")
