"""The recompute pass of a column: which tiles keep internals, and which keep their input and run again.

Below the tiles that are held from the forward, a dynamic program over the layers enumerates the modes of the pass: R keeps the
internals, I keeps the tile's input and runs the tile a second time just before its adjoint. Its states are Pareto-minimal in
(live bytes, ticks, peak on the way up, peak on the way down); these four numbers are all that the layers above can feel of
those below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adjcomp.passes.schedule.column import Bools, Column, Ints, Ticks, least_missing

STATE_LIMIT = 384  # states of the dynamic program; more are thinned out for plans and merged for bounds


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


@dataclass(frozen=True)
class PassTable:
    """What the recompute pass of a column can be, whatever its forward holds."""

    ends: tuple[tuple[int, Ints, Ints], ...]  # top layer; for each state below it the backward peak (bytes) and the time (ticks)
    noted: tuple[Ints, Ints]  # the same up to the head's input, where the head left its internals in the forward
    history: tuple[tuple[Ints, Bools], ...]
    complete: bool


def pass_table(column: Column, tick: float, *, optimistic: bool = False, limit: int = STATE_LIMIT) -> PassTable:
    """The passes of `column` that may be best for some budget; times are rounded to multiples of `tick` seconds.

    With more than `limit` states the table is thinned: plans use the states that remain. An `optimistic` table merges them into
    states at least as good as each of them, so that no real choice is better than the table: that is what bounds use.
    """
    ticks = Ticks(column, tick)
    nothing = np.zeros(1, np.int64)
    states = _States(np.zeros(1, bool), nothing, nothing, nothing, nothing - least_missing(column))
    ends: list[tuple[int, Ints, Ints]] = []
    history: list[tuple[Ints, Bools]] = []
    complete = True
    for layer in range(column.head + 1):
        if layer >= column.bottom:
            # The top tile of a pass keeps its internals, because its adjoint comes next.
            kept = _keep_internals(column, ticks, states, layer)
            ends.append((layer, np.maximum(_base(column, layer) - _missing(column, layer) + kept.up, kept.down), kept.ticks))
        if layer < column.head:
            wider, parents, again = _extend(column, ticks, states, layer)
            index = _pareto(wider)
            complete = complete and len(index) <= limit
            states, index = _shrink(wider.take(index), index, limit, optimistic)
            history.append((parents[index], again[index]))
    return PassTable(tuple(ends), _noted(column, states), tuple(history), complete)


def _noted(column: Column, states: _States) -> tuple[Ints, Ints]:
    """Backward peak and time of passes that bring the head's input, beside internals that the head left in the forward."""
    head = column.tiles[column.head]
    beside = head.keep_bytes - (0 if head.reads_carry else column.border_in[column.head])
    live = states.live + beside + (_carried(column, states, column.head) if head.reads_input else 0)
    vjp = _vjp_peak(column, column.head, live + head.adjoint_workspace_bytes, states.live)
    before = _base(column, column.head) - _missing(column, column.head) + states.up + beside
    return np.maximum(np.maximum(before, vjp), states.down), states.ticks


def _base(column: Column, layer: int) -> int:
    """Bytes live besides what the pass keeps after the VJPs above `layer`: borders, adjoint states, g[layer]."""
    tile = column.tiles[layer]
    below, above = slice(layer + 1), slice(layer + 1, None)
    adjoints = sum(column.adjoint_in[below]) + sum(column.adjoint_out[above])
    return sum(column.border_in[below]) + adjoints + (tile.cotangent_bytes if layer < column.head else 0)


def _missing(column: Column, layer: int) -> int:
    """Bytes of accumulators that aren't there just before the VJP of `layer`."""
    return 0 if column.gradients is None else column.gradients.before[layer]


def _vjp_peak(column: Column, layer: int, running: Ints, below: Ints) -> Ints:
    """Peak of the VJP of `layer`, which needs `running` bytes over the base; and of a publication right after it, when the pass
    has left `below`.
    """
    base, missing = _base(column, layer), column.gradients
    if missing is None:
        return base + running
    peak = base - missing.during[layer] + running
    if not missing.publishing:
        return peak
    passed = column.tiles[layer - 1].cotangent_bytes if layer > 0 and column.tiles[layer].passes_cotangent else 0
    after = sum(column.border_in[:layer]) + sum(column.adjoint_in[:layer]) + sum(column.adjoint_out[layer:]) + passed
    return np.maximum(peak, after - missing.publishing[layer] + below)


def _extend(column: Column, ticks: Ticks, states: _States, layer: int) -> tuple[_States, Ints, Bools]:
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


def _keep_internals(column: Column, ticks: Ticks, states: _States, layer: int) -> _States:
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
        np.maximum(states.down, _vjp_peak(column, layer, live + tile.adjoint_workspace_bytes, states.live)),
    )


def _keep_input(column: Column, ticks: Ticks, states: _States, layer: int) -> _States:
    """Mode I: the pass leaves x[layer-1]; the tile runs once more, keeping internals, just before its adjoint."""
    tile = column.tiles[layer]
    carried = _carried(column, states, layer)
    live = states.live + carried
    second = _base(column, layer) - _missing(column, layer) + live + tile.keep_workspace_bytes
    beside = live + tile.keep_bytes + (tile.stream_bytes if tile.reads_output else 0)
    beside = beside - (0 if tile.reads_carry else column.border_in[layer]) - (0 if tile.reads_input else carried)
    down = np.maximum(second, _vjp_peak(column, layer, beside + tile.adjoint_workspace_bytes, states.live))
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
