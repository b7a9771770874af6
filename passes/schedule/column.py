"""Everything one chunk can choose, as a table of options: bytes it leaves behind, bytes it needs, seconds.

For a chunk c let D be the bytes that stay for it from the end of its forward to its backward: internals held from the forward,
residual chunks that their VJPs read, and the border s[·,c-1] that comes into it. Chunks before c leave the sum of their D; on
top of that sum chunk c needs F bytes in its forward and P in its backward. So a chunk meets the others in one number, the sum
of the D before it.

`held` fixes D and F. Below the held tiles a dynamic program over the layers of the recompute pass enumerates which tiles keep
internals (R) and which keep their input and run again (I). Its states are Pareto-minimal in (live bytes, ticks, peak on the way
up, peak on the way down); these four numbers are all that the layers above can feel of those below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import ColumnMode, bottom_layer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STATE_LIMIT = 384  # states of the dynamic program; more are thinned out for plans and merged for bounds


@dataclass(frozen=True)
class Column:
    """One chunk's tiles and the values at its sides, by layer; bytes."""

    tiles: tuple[TileCost, ...]
    border_in: tuple[int, ...]  # s[k,c-1]
    border_out: tuple[int, ...]  # s[k,c]; zero for the last chunk, which drops it at once
    adjoint_in: tuple[int, ...]  # lam[k,c], live when the backward of the chunk starts
    adjoint_out: tuple[int, ...]  # lam[k,c-1], live when it ends; zero for the first chunk, which drops it at once
    bottom: int  # the lowest layer with a VJP

    @property
    def head(self) -> int:
        """Index of the head."""
        return len(self.tiles) - 1


def column_of(costs: StackCosts, chunk: int) -> Column:
    """The column of chunk `chunk`."""
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
    )


@dataclass(frozen=True)
class OptionTable:
    """OptionTable of one column. All arrays have shape (options,)."""

    left: Ints  # D, bytes
    forward_peak: Ints  # F, bytes
    backward_peak: Ints  # P, bytes
    ticks: Ints  # time of forward, recomputation and VJPs, in ticks of the instance
    held: Ints  # tiles held from the forward
    state: Ints  # index of the state below the top recomputed tile, for `mode`
    history: tuple[tuple[Ints, Bools], ...] = field(repr=False)  # per layer: parent state, whether the tile runs again
    complete: bool  # nothing was thinned out: every choice is dominated by an option

    def mode(self, index: int, column: Column) -> ColumnMode:
        """The modes of option `index`."""
        held, state = int(self.held[index]), int(self.state[index])
        top = column.head - held
        if top < column.bottom:
            return ColumnMode(held)
        again = []
        for layer in range(top - 1, -1, -1):
            parent, runs_again = self.history[layer]
            if runs_again[state]:
                again.append(layer)
            state = int(parent[state])
        return ColumnMode(held, frozenset(again))

    def select(self, keep: Ints | Bools) -> OptionTable:
        """The options at `keep`, in its order."""
        return OptionTable(
            left=self.left[keep],
            forward_peak=self.forward_peak[keep],
            backward_peak=self.backward_peak[keep],
            ticks=self.ticks[keep],
            held=self.held[keep],
            state=self.state[keep],
            history=self.history,
            complete=self.complete,
        )


@dataclass(frozen=True)
class _Held:
    """The part of a column that `held` alone decides; bytes and ticks."""

    left: int
    forward_peak: int
    backward_peak: int
    ticks: int


@dataclass(frozen=True)
class _States:
    """States of the dynamic program after some layers; all arrays have shape (states,)."""

    output_kept: Bools  # x[k] of the last layer is kept for its own VJP
    live: Ints  # bytes kept by the pass so far, without the residual chunk on its way up; borders dropped count negative
    ticks: Ints
    up: Ints  # peak on the way up, over the bytes live when the pass starts
    down: Ints  # peak on the way down, over the bytes that earlier chunks left

    def take(self, index: Ints) -> _States:
        return _States(self.output_kept[index], self.live[index], self.ticks[index], self.up[index], self.down[index])


def column_options(column: Column, tick: float, *, optimistic: bool = False, limit: int = STATE_LIMIT) -> OptionTable:
    """The options of `column` that may be best for some budget; times are rounded to multiples of `tick` seconds.

    With more than `limit` states the table is thinned: plans use the states that remain. An `optimistic` table merges them into
    states at least as good as each of them, so that no real choice is better than the table: that is what bounds use.
    """
    ticks = _Ticks(column, tick)
    states = _States(np.zeros(1, bool), *(np.zeros(1, np.int64) for _ in range(4)))
    rows: list[tuple[Ints, ...]] = []
    history: list[tuple[Ints, Bools]] = []
    complete = True
    for layer in range(column.head + 1):
        if layer >= column.bottom:
            rows.append(_close(column, ticks, states, layer))
        if layer < column.head:
            wider, parents, again = _extend(column, ticks, states, layer)
            kept = _pareto(wider)
            complete = complete and len(kept) <= limit
            states, kept = _shrink(wider.take(kept), kept, limit, optimistic)
            history.append((parents[kept], again[kept]))
    everything = _held(column, ticks, column.head + 1 - column.bottom)
    rows.append(_row(everything, column.head + 1 - column.bottom, np.zeros(1, np.int64), np.zeros(1, np.int64)))
    left, forward, backward, time, held, state = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return OptionTable(left, forward, backward, time, held, state, tuple(history), complete)


class _Ticks:
    """Times of a column's tiles in whole ticks, so that equal sums are equal whatever their order."""

    def __init__(self, column: Column, tick: float) -> None:
        self.forward = [round(t.forward_seconds / tick) for t in column.tiles]
        self.keep = [round(t.keep_seconds / tick) for t in column.tiles]
        self.adjoint = sum(round(t.adjoint_seconds / tick) for t in column.tiles if t.has_vjp)


def _held(column: Column, ticks: _Ticks, held: int) -> _Held:
    """Follow a column that holds its top `held` tiles through its forward, and through the VJPs of the held tiles."""
    tiles, head = column.tiles, column.head
    first = head + 1 - held
    recomputed = first - 1 >= column.bottom
    keeps_output = [k >= first and tiles[k].reads_output and k < head for k in range(head + 1)]
    keeps_input = [k >= first and tiles[k].reads_input and k > 0 for k in range(head + 1)]
    keeps_border = [(k < first and recomputed) or (k >= first and tiles[k].reads_carry) for k in range(head + 1)]
    live, peak, spent = sum(column.border_in), 0, 0
    for k, tile in enumerate(tiles):
        peak = max(peak, live + (tile.keep_workspace_bytes if k >= first else tile.forward_workspace_bytes))
        live += tile.stream_bytes * (k < head) + column.border_out[k] + tile.keep_bytes * (k >= first)
        live -= 0 if keeps_border[k] else column.border_in[k]
        live -= 0 if k == 0 or keeps_input[k] or keeps_output[k - 1] else tiles[k - 1].stream_bytes
        spent += ticks.keep[k] if k >= first else ticks.forward[k]
    left = live - sum(column.border_out)
    live = left + sum(column.adjoint_in)
    backward = live
    for k in range(head, first - 1, -1):
        tile = tiles[k]
        backward = max(backward, live + tile.adjoint_workspace_bytes)
        live += tiles[k - 1].cotangent_bytes if k > 0 and tile.passes_cotangent else 0
        live += column.adjoint_out[k] - column.adjoint_in[k] - tile.keep_bytes - tile.cotangent_bytes * (k < head)
        live -= column.border_in[k] if keeps_border[k] else 0
        live -= tile.stream_bytes if keeps_output[k] else 0
        live -= tiles[k - 1].stream_bytes if keeps_input[k] and not keeps_output[k - 1] else 0
    return _Held(left, peak, backward, spent + ticks.adjoint)


def _row(part: _Held, held: int, backward: Ints, ticks: Ints) -> tuple[Ints, ...]:
    """Arrays of OptionTable for one `held` and the states below it."""
    n = len(backward)
    same = (np.full(n, value, np.int64) for value in (part.left, part.forward_peak))
    return (*same, np.maximum(backward, part.backward_peak), ticks + part.ticks, np.full(n, held, np.int64), np.arange(n))


def _base(column: Column, layer: int) -> int:
    """Bytes live besides what the pass keeps after the VJPs above `layer`: borders, adjoint states, g[layer]."""
    tile = column.tiles[layer]
    below, above = slice(layer + 1), slice(layer + 1, None)
    adjoints = sum(column.adjoint_in[below]) + sum(column.adjoint_out[above])
    return sum(column.border_in[below]) + adjoints + (tile.cotangent_bytes if layer < column.head else 0)


def _close(column: Column, ticks: _Ticks, states: _States, top: int) -> tuple[Ints, ...]:
    """OptionTable whose pass ends with tile `top`, which keeps its internals because its adjoint comes next."""
    base = _base(column, top)
    kept = _keep_internals(column, ticks, states, top)
    part = _held(column, ticks, column.head - top)
    return _row(part, column.head - top, np.maximum(base + kept.up, kept.down), kept.ticks)


def _extend(column: Column, ticks: _Ticks, states: _States, layer: int) -> tuple[_States, Ints, Bools]:
    """States after tile `layer` in every mode, with the state each came from and whether the tile runs again."""
    tile, n = column.tiles[layer], len(states.live)
    if layer < column.bottom:
        carried = np.int64(column.tiles[layer - 1].stream_bytes if layer > 0 else 0)
        up = np.maximum(states.up, states.live + carried + tile.forward_workspace_bytes)
        passed = _States(
            np.zeros(n, bool), states.live - column.border_in[layer], states.ticks + ticks.forward[layer], up, states.down
        )
        return passed, np.arange(n), np.zeros(n, bool)
    kept, again = _keep_internals(column, ticks, states, layer), _keep_input(column, ticks, states, layer)
    both = _States(*(np.concatenate(pair) for pair in zip(_arrays(kept), _arrays(again), strict=True)))
    return both, np.tile(np.arange(n), 2), np.repeat([False, True], n)


def _keep_internals(column: Column, ticks: _Ticks, states: _States, layer: int) -> _States:
    """Mode R: the pass leaves keep[layer]."""
    tile = column.tiles[layer]
    carried = _carried(column, states, layer)
    stays = tile.reads_output and layer < column.head
    live = states.live + tile.keep_bytes + (carried if tile.reads_input else 0) + (tile.stream_bytes if stays else 0)
    live = live - (0 if tile.reads_carry else column.border_in[layer])
    return _States(
        np.full(len(live), stays),
        live,
        states.ticks + ticks.keep[layer],
        np.maximum(states.up, states.live + carried + tile.keep_workspace_bytes),
        np.maximum(states.down, _base(column, layer) + live + tile.adjoint_workspace_bytes),
    )


def _keep_input(column: Column, ticks: _Ticks, states: _States, layer: int) -> _States:
    """Mode I: the pass leaves x[layer-1]; the tile runs once more, keeping internals, just before its adjoint."""
    tile = column.tiles[layer]
    carried = _carried(column, states, layer)
    live = states.live + carried
    second = _base(column, layer) + live
    vjp = second + tile.keep_bytes + (tile.stream_bytes if tile.reads_output else 0)
    vjp = vjp - (0 if tile.reads_carry else column.border_in[layer]) - (0 if tile.reads_input else carried)
    down = np.maximum(second + tile.keep_workspace_bytes, vjp + tile.adjoint_workspace_bytes)
    return _States(
        np.zeros(len(live), bool),
        live,
        states.ticks + ticks.forward[layer] + ticks.keep[layer],
        np.maximum(states.up, live + tile.forward_workspace_bytes),
        np.maximum(states.down, down),
    )


def _carried(column: Column, states: _States, layer: int) -> Ints:
    """Bytes of x[layer-1], where it isn't kept by the tile that made it."""
    below = column.tiles[layer - 1].stream_bytes if layer > 0 else 0
    return np.where(states.output_kept, 0, below).astype(np.int64)


def _arrays(states: _States) -> tuple[npt.NDArray[np.generic], ...]:
    return (states.output_kept, states.live, states.ticks, states.up, states.down)


def _pareto(states: _States) -> Ints:
    """Indices of the states that no other state with the same `output_kept` dominates, by bytes live."""
    order = np.lexsort((states.down, states.up, states.ticks, states.live))
    beaten = np.zeros((len(order), len(order)), bool)
    np.less.outer(np.arange(len(order)), np.arange(len(order)), out=beaten)
    for array in (states.live, states.ticks, states.up, states.down):
        beaten &= np.less_equal.outer(array[order], array[order])
    beaten &= np.equal.outer(states.output_kept[order], states.output_kept[order])
    return order[~beaten.any(axis=0)]


def _shrink(states: _States, index: Ints, limit: int, optimistic: bool) -> tuple[_States, Ints]:
    """At most about `limit` states: evenly spread ones, or (optimistic) the best of each run of neighbours in every number."""
    if len(index) <= limit:
        return states, index
    groups = np.array_split(np.lexsort((states.live, states.output_kept)), limit)
    first = np.array([group[0] for group in groups])
    if not optimistic:
        return states.take(first), index[first]
    pure = [
        part for group in groups for part in (group[states.output_kept[group]], group[~states.output_kept[group]]) if len(part)
    ]
    lowest = [np.array([array[part].min() for part in pure]) for array in _arrays(states)[1:]]
    first = np.array([part[0] for part in pure])
    return _States(states.output_kept[first], *lowest), index[first]


def _adjoint_bytes(tile: TileCost) -> int:
    """Bytes of the adjoint state that a tile takes in."""
    return tile.adjoint_bytes if tile.has_vjp and tile.carry_bytes > 0 else 0
