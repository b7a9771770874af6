"""Everything one chunk can choose, as a table of options: bytes it leaves behind, bytes it needs, time.

For a chunk c let D be the bytes that stay for it from the end of its forward to its backward: internals held from the forward,
residual chunks that their VJPs read, and the border s[·,c-1] that comes into it. Chunks before c leave the sum of their D; on
top of that sum chunk c needs F bytes in its forward and P in its backward. So a chunk meets the others in one number, the sum
of the D before it. How many tiles are held fixes D and F; the tiles below are recomputed (`adjcomp.passes.schedule.recompute`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.schedule.column import Bools, Column, Ints, Ticks, least_missing
from adjcomp.passes.schedule.recompute import PassTable


@dataclass(frozen=True)
class OptionTable:
    """Options of one column. All arrays have shape (options,)."""

    left: Ints  # D, bytes
    forward_peak: Ints  # F, bytes
    backward_peak: Ints  # P, bytes
    ticks: Ints  # time of forward, recomputation and VJPs, in ticks of the instance
    held: Ints  # tiles held from the forward
    noted: Bools  # whether the head left its internals in the forward although nothing is held
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
        return ColumnMode(held, frozenset(again), bool(self.noted[index]))

    def select(self, keep: Ints | Bools) -> OptionTable:
        """The options at `keep`, in its order."""
        return OptionTable(
            left=self.left[keep],
            forward_peak=self.forward_peak[keep],
            backward_peak=self.backward_peak[keep],
            ticks=self.ticks[keep],
            held=self.held[keep],
            noted=self.noted[keep],
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


def column_options(column: Column, tick: float, passes: PassTable, *, noting: bool = True) -> OptionTable:
    """Every option of `column`: how many tiles it holds, and a pass for those below; `noting`: or only the head's internals."""
    ticks = Ticks(column, tick)
    nothing = np.zeros(1, np.int64)
    floor = nothing - least_missing(column)
    ends = [
        *((column.head - top, False, peak, time) for top, peak, time in passes.ends),
        *([(0, True, *passes.noted)] if noting and _can_note(column) else []),
        (column.head + 1 - column.bottom, False, floor, nothing),
    ]
    parts = [_held(column, ticks, held, noted) for held, noted, _, _ in ends]
    sizes = [len(peak) for *_, peak, _ in ends]

    def repeat(values: list[int]) -> Ints:
        return np.repeat(np.array(values, np.int64), sizes)

    return OptionTable(
        left=repeat([part.left for part in parts]) + column.rounded,
        forward_peak=repeat([part.forward_peak for part in parts]) + column.rounded,
        backward_peak=np.maximum(np.concatenate([peak for *_, peak, _ in ends]), repeat([part.backward_peak for part in parts])),
        ticks=np.concatenate([time for *_, time in ends]) + repeat([part.ticks for part in parts]),
        held=repeat([held for held, *_ in ends]),
        noted=repeat([noted for _, noted, *_ in ends]).astype(bool),
        state=np.concatenate([np.arange(size) for size in sizes]),
        history=passes.history,
        complete=passes.complete,
    )


def _can_note(column: Column) -> bool:
    """Whether the head's internals alone may be worth keeping: where its VJP reads its input besides, they are less than both."""
    return column.head > 0 and column.tiles[column.head].has_vjp and column.tiles[column.head].reads_input


def _held(column: Column, ticks: Ticks, held: int, noted: bool) -> _Held:
    """Follow a column that holds its top `held` tiles through its forward, and through the VJPs of the held tiles."""
    tiles, head = column.tiles, column.head
    first = head + 1 - held
    recomputed = first - 1 >= column.bottom
    kept = [k >= first or (noted and k == head) for k in range(head + 1)]
    keeps_output = [k >= first and tiles[k].reads_output and k < head for k in range(head + 1)]
    keeps_input = [k >= first and tiles[k].reads_input and k > 0 for k in range(head + 1)]
    keeps_border = [(not kept[k] and recomputed) or (kept[k] and tiles[k].reads_carry) for k in range(head + 1)]
    live, peak, spent = sum(column.border_in), 0, 0
    for k, tile in enumerate(tiles):
        peak = max(peak, live + (tile.keep_workspace_bytes if kept[k] else tile.forward_workspace_bytes))
        live += tile.stream_bytes * (k < head) + column.border_out[k] + tile.keep_bytes * kept[k]
        live -= 0 if keeps_border[k] else column.border_in[k]
        live -= 0 if k == 0 or keeps_input[k] or keeps_output[k - 1] else tiles[k - 1].stream_bytes
        spent += ticks.keep[k] if kept[k] else ticks.forward[k]
    left = live - sum(column.border_out)
    live = left + sum(column.adjoint_in)
    missing = column.gradients
    backward = live - (missing.before[head] if missing else 0)
    for k in range(head, first - 1, -1):
        tile = tiles[k]
        backward = max(backward, live + tile.adjoint_workspace_bytes - (missing.during[k] if missing else 0))
        live += tiles[k - 1].cotangent_bytes if k > 0 and tile.passes_cotangent else 0
        live += column.adjoint_out[k] - column.adjoint_in[k] - tile.keep_bytes - tile.cotangent_bytes * (k < head)
        live -= column.border_in[k] if keeps_border[k] else 0
        live -= tile.stream_bytes if keeps_output[k] else 0
        live -= tiles[k - 1].stream_bytes if keeps_input[k] and not keeps_output[k - 1] else 0
        backward = max(backward, live - missing.publishing[k]) if missing and missing.publishing else backward
    return _Held(left, peak, backward, spent + ticks.adjoint)
