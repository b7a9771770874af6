"""Reductions over time as partial sums: each tile adds its share, the epilogue finishes the model's own op."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from adjcomp.ir.stack import OutputKind
from adjcomp.passes.tilegraph import TileGraph
from adjcomp.passes.timearguments import argument
from adjcomp.passes.timeaxis import time_factor

aten = torch.ops.aten
Emit = Callable[[TileGraph], fx.Node]
Finish = Callable[[fx.Graph, dict[fx.Node, fx.Node], fx.Node, fx.Node], None]


@dataclass(frozen=True)
class Partial:
    """One partial sum. source: the activation whose tile makes it. shape, dtype: of the total, in accumulation dtype."""

    source: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Emit
    close: Finish

    def emit(self, tile: TileGraph) -> None:
        """Add this sum to its tile's outputs."""
        tile.results.append((OutputKind.SUM, self.make(tile)))

    def finish(self, graph: fx.Graph, memo: dict[fx.Node, fx.Node], total: fx.Node, length: fx.Node) -> None:
        """In the epilogue: bind the traced nodes that this sum stands for."""
        self.close(graph, memo, total, length)

    @staticmethod
    def read(node: fx.Node) -> Partial:
        """An output of the chunked cross-entropy: it already is a partial sum."""
        value = node.meta["val"]

        def make(tile: TileGraph) -> fx.Node:
            return _new(tile.graph, operator.getitem, (tile.fetch(node.args[0]), node.args[1]), {}, node, value)  # type: ignore[arg-type]

        def close(graph: fx.Graph, memo: dict[fx.Node, fx.Node], total: fx.Node, length: fx.Node) -> None:
            memo[node] = total

        return Partial(node.args[0], tuple(value.shape), value.dtype, make, close)  # type: ignore[arg-type]


def _new(graph: fx.Graph, target: Any, args: Any, kwargs: Any, like: fx.Node, value: Any) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    made.meta = {**like.meta, "val": value}
    return made


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def partial_sum(node: fx.Node, time: Any) -> list[Partial] | None:
    """The partial sums that stand for a reduction over time; None where the op is no sum."""
    if node.target in (aten.sum.default, aten.sum.dim_IntList):
        return [_sum(node, None)]
    if node.target in (aten.mean.default, aten.mean.dim):
        return [_sum(node, _mean_count(node, time))]
    if node.target is aten.nll_loss_forward.default and argument(node, "reduction") in (1, 2):
        return _nll(node)
    return None


def _mean_count(node: fx.Node, time: Any) -> int:
    """Elements behind each mean, divided by T."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = argument(node, "dim") if node.target is aten.mean.dim else None
    count = 1
    for dim in [d % value.ndim for d in dims] if dims else range(value.ndim):
        factor = time_factor(value.shape[dim], time)
        count *= factor if factor else int(value.shape[dim])
    return count


def _sum(node: fx.Node, mean_count: int | None) -> Partial:
    source, result = node.args[0], node.meta["val"]
    dtype = _accumulator(result.dtype)
    reduces_all = node.target in (aten.sum.default, aten.mean.default)
    dims = None if reduces_all else argument(node, "dim")
    keepdim = False if reduces_all else bool(argument(node, "keepdim"))

    def make(tile: TileGraph) -> fx.Node:
        x = tile.fetch(source)  # type: ignore[arg-type]
        value = result.new_empty(result.shape, dtype=dtype)
        if dims is None:
            return _new(tile.graph, aten.sum.default, (x,), {"dtype": dtype}, node, value)
        return _new(tile.graph, aten.sum.dim_IntList, (x, dims, keepdim), {"dtype": dtype}, node, value)

    def close(graph: fx.Graph, memo: dict[fx.Node, fx.Node], total: fx.Node, length: fx.Node) -> None:
        made = total
        if mean_count is not None:
            made = graph.call_function(aten.div.Tensor, (made, graph.call_function(operator.mul, (length, mean_count))))
        memo[node] = (
            made if dtype is result.dtype else graph.call_function(aten._to_copy.default, (made,), {"dtype": result.dtype})
        )

    return Partial(source, tuple(int(s) for s in result.shape), dtype, make, close)  # type: ignore[arg-type]


def _nll(node: fx.Node) -> list[Partial]:
    """nll_loss: the sum of losses and the total weight; a mean is their quotient."""
    source, result = node.args[0], node.meta["val"][0]
    dtype = _accumulator(result.dtype)
    made_op: dict[int, fx.Node] = {}

    def share(tile: TileGraph, index: int) -> fx.Node:
        if id(tile) not in made_op:
            args = [tile.fetch(a) if isinstance(a, fx.Node) else a for a in node.args]
            args[3] = 2
            made_op[id(tile)] = _new(tile.graph, node.target, tuple(args), {}, node, node.meta["val"])
        read = _new(tile.graph, operator.getitem, (made_op[id(tile)], index), {}, node, node.meta["val"][index])
        if dtype is result.dtype:
            return read
        return _new(tile.graph, aten._to_copy.default, (read,), {"dtype": dtype}, node, result.new_empty((), dtype=dtype))

    def close_total(graph: fx.Graph, memo: dict[fx.Node, fx.Node], total: fx.Node, length: fx.Node) -> None:
        for user in node.users:
            memo[user] = total

    def close_weight(graph: fx.Graph, memo: dict[fx.Node, fx.Node], weight: fx.Node, length: fx.Node) -> None:
        for user in node.users:
            if user.args[1] == 1:
                memo[user] = weight
            elif argument(node, "reduction") == 1:
                memo[user] = graph.call_function(aten.div.Tensor, (memo[user], weight))

    return [
        Partial(source, (), dtype, lambda tile: share(tile, 0), close_total),  # type: ignore[arg-type]
        Partial(source, (), dtype, lambda tile: share(tile, 1), close_weight),  # type: ignore[arg-type]
    ]
