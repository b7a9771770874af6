"""One chunk as the planner sees it: its tiles, and the values that its neighbours in time leave with it or take from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import bottom_layer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Missing:
    """Bytes of all gradient accumulators together that aren't there in a column's backward, by layer: not yet, or no longer."""

    before: tuple[int, ...]  # just before the VJP of a layer, when the tiles of those below run again
    during: tuple[int, ...]  # in the VJP of a layer
    publishing: tuple[int, ...]  # at the peak of a layer's publication, right after its VJP; none where those come at the end
    least: int  # of all through the backward, its end included


@dataclass(frozen=True)
class Column:
    """One chunk's tiles and the values at its sides, by layer; bytes."""

    tiles: tuple[TileCost, ...]
    border_in: tuple[int, ...]  # s[k,c-1]
    border_out: tuple[int, ...]  # s[k,c]; zero for the last chunk, which drops it at once
    adjoint_in: tuple[int, ...]  # lam[k,c], live when the backward of the chunk starts
    adjoint_out: tuple[int, ...]  # lam[k,c-1], live when it ends; zero for the first chunk, which drops it at once
    bottom: int  # the lowest layer with a VJP
    rounded: int = 0  # incoming states kept in lower precision from before the forward until just before the backward
    gradients: Missing | None = None  # None: all accumulators are there all through its backward

    @property
    def head(self) -> int:
        """Index of the head."""
        return len(self.tiles) - 1


def column_of(costs: StackCosts, chunk: int) -> Column:
    """The column of chunk `chunk` in a time-major plan."""
    layers = range(costs.head + 1)
    now, before = [costs.tile(k, chunk) for k in layers], [costs.tile(k, max(chunk - 1, 0)) for k in layers]
    last = chunk == costs.chunk_count - 1
    return Column(
        tiles=tuple(now),
        border_in=tuple(t.carry_bytes for t in before),
        border_out=tuple(0 if last else t.carry_bytes for t in now),
        adjoint_in=tuple(_adjoint_bytes(t) for t in now),
        adjoint_out=tuple(0 if chunk == 0 else _adjoint_bytes(t) for t in before),
        bottom=bottom_layer(costs),
        gradients=_missing(costs, publishing=chunk == 0) if last and costs.gradients else None,
    )


def _missing(costs: StackCosts, *, publishing: bool) -> Missing:
    """Of the chunk whose backward comes first: each gradient is made by the highest layer that adds to it, and becomes what is
    published at the lowest, if each layer is published (`publishing`) right after its VJP.
    """
    missing = sum(gradient.accumulator_bytes for gradient in costs.gradients)
    before, during, peaks = [0] * (costs.head + 1), [0] * (costs.head + 1), [0] * (costs.head + 1)
    for layer in range(costs.head, -1, -1):
        before[layer] = missing
        missing -= sum(g.accumulator_bytes for g in costs.gradients if g.layers[-1] == layer)
        during[layer], peaks[layer] = missing, missing - costs.publish_bytes[layer]
        if publishing:
            missing += sum(g.accumulator_bytes - g.published_bytes for g in costs.gradients if g.layers[0] == layer)
    least = min(*during, missing, *(peaks if publishing else ()))
    return Missing(tuple(before), tuple(during), tuple(peaks) if publishing else (), least)


def least_missing(column: Column) -> int:
    """Bytes of accumulators that a column's backward never needs all at once; 0 where all are there in it."""
    return 0 if column.gradients is None else column.gradients.least


class Ticks:
    """Times of a column's tiles in whole ticks, so that equal sums are equal whatever their order."""

    def __init__(self, column: Column, tick: float) -> None:
        self.forward = [round(t.forward_seconds / tick) for t in column.tiles]
        self.keep = [round(t.keep_seconds / tick) for t in column.tiles]
        self.adjoint = sum(round(t.adjoint_seconds / tick) for t in column.tiles if t.has_vjp)


def _adjoint_bytes(tile: TileCost) -> int:
    """Bytes of the adjoint state that a tile takes in."""
    return tile.adjoint_bytes if tile.has_vjp and tile.carry_bytes > 0 else 0
