"""Nesting over chunks: only some borders are stored, the others are recomputed from the nearest one before them.

A segment of n chunks whose first border is stored, with l borders stored in all (its own included), is reversed by advancing j
chunks from its border, storing the border found there, reversing the n - j chunks behind it with l + 1 borders stored, dropping
that border, and reversing the first j chunks:

    R(1, l) = t(l),        R(n, l) = min over 0 < j < n of  j f + R(n - j, l + 1) + R(j, l),

where f is the time of an advance and t(l) the fastest option of a chunk that fits beside l - 1 other borders. The forward
passes every chunk once anyway and stores for nothing: W(1, l) = t_last(l), W(n, l) = min over j of W(n - j, l + 1) + R(j, l),
and W(C, 1) is the whole step. With t constant this is binomial checkpointing (Griewank and Walther's revolve); letting t depend
on l trades borders against internals of the chunk at work. Nothing is held from the forward but in the last chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.values import has_carry
from adjcomp.passes.emit import Run
from adjcomp.passes.schedule.column import Column, Ints
from adjcomp.passes.schedule.instance import Instance, Menu

MOST_STORED = 96  # borders stored at once
MOST_CHUNKS = 4096  # of a nested plan
MOST_REPEATS = 3  # advances over each chunk that the fewest stored borders may cost
NEVER = 1 << 60  # ticks or bytes of what can't be


@dataclass(frozen=True)
class Nested:
    """The best nested plan of an instance."""

    ticks: int
    runs: tuple[Run, ...]  # what the backward does, in order
    modes: tuple[ColumnMode, ...]


def least_stored(chunk_count: int) -> int:
    """The fewest stored borders with which `chunk_count` chunks are reversed in at most MOST_REPEATS advances over each.

    With l borders besides that of the chunk at work, and r advances over each, (l + r over r) chunks can be reversed.
    """
    stored = 1
    while math.comb(stored + MOST_REPEATS, MOST_REPEATS) < chunk_count:
        stored += 1
    return stored + 1


def least_advances(chunk_count: int, stored: int) -> int:
    """The fewest advances with which `chunk_count` chunks are reversed after a forward, with at most `stored` borders stored.

    Revolve's number r n - (m + r over r - 1) for m free places, where r is the least with (m + r over r) >= n; the forward itself
    makes the n - 1 advances of its first sweep.
    """
    if stored < 2 and chunk_count > 1:
        return NEVER
    free, repeats = stored - 1, 0
    while math.comb(free + repeats, repeats) < chunk_count:
        repeats += 1
    return repeats * chunk_count - (math.comb(free + repeats, repeats - 1) if repeats else 0) - (chunk_count - 1)


class Needs:
    """What the pieces of a nested plan need of the budget; bytes."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.inner = instance.lean_menu
        self.last = instance.menus[2]
        self.border = sum(self.inner.column.border_in)
        column = self.inner.column
        self._backward = instance.backward_bytes + sum(column.adjoint_in)
        layers = self.advanced_layers
        self._advance_stored, self._advance_dropped = (_sweep(column, layers, keep) for keep in (True, False))
        self._forward_stored, self._forward_dropped = (_sweep(column, column.head + 1, keep) for keep in (True, False))

    @cached_property
    def advanced_layers(self) -> int:
        """How many layers an advance runs: up to the highest that hands on a state."""
        return max((k + 1 for k, tile in enumerate(self.instance.costs.layers) if has_carry(tile)), default=0)

    def advance(self, stored: int, chunks: int) -> int:
        """Advancing over `chunks` chunks beside `stored` borders, that of the first included."""
        later = self._advance_dropped + self.border if chunks > 1 else 0
        return self._backward + (stored - 1) * self.border + max(self._advance_stored, later)

    def forward(self, stored: int, chunks: int) -> int:
        """The first forward over `chunks` chunks of which the first has its border stored, the `stored`-th so far."""
        later = self._forward_dropped + self.border if chunks > 1 else 0
        return self.instance.resident_bytes + (stored - 1) * self.border + max(self._forward_stored, later)

    def minimum(self) -> int:
        """The smallest budget of a nested plan."""
        count = self.instance.costs.chunk_count
        if not 3 <= count <= MOST_CHUNKS or self.border == 0:
            return NEVER
        stored = least_stored(count)
        reverse = max(int(self.inner.need.min()), int(self.last.need.min())) + (stored - 1) * self.border
        moving = max(self.advance(stored - 1, 2), self.forward(stored - 1, 2), self.forward(stored, 1))
        return max(reverse, moving, self.instance.fixed_bytes)


def _sweep(column: Column, layers: int, keep_border: bool) -> int:
    """Peak bytes of a forward through the first `layers` layers that holds nothing, its incoming border included."""
    live = peak = sum(column.border_in)
    for k, tile in enumerate(column.tiles[:layers]):
        peak = max(peak, live + tile.forward_workspace_bytes)
        live += (tile.stream_bytes if k < column.head else 0) - (column.tiles[k - 1].stream_bytes if k else 0)
        live += column.border_out[k] - (0 if keep_border else column.border_in[k])
    return peak


def nested_minimum(instance: Instance) -> int:
    """The smallest budget of a nested plan."""
    return Needs(instance).minimum()


class Nesting:
    """The dynamic program of one instance and budget."""

    def __init__(self, instance: Instance, budget: int) -> None:
        self.instance, self.budget = instance, budget
        self.count = instance.costs.chunk_count
        self.needs = Needs(instance)
        self.feasible = budget >= self.needs.minimum()
        spare = max(0, budget - min(int(self.needs.inner.need.min()), int(self.needs.last.need.min())))
        self.stored = min(self.count, MOST_STORED, 1 + spare // max(self.needs.border, 1))
        self._ways = np.empty(self.count, np.int64)
        self.step = sum(round(t.forward_seconds / instance.tick) for t in instance.costs.layers[: self.needs.advanced_layers])

    def quick_bound(self) -> int:
        """Ticks that no nested plan goes below.

        A border before chunk c that isn't stored at its turn has to be advanced over later. So with A advances at least c - A
        borders are stored then, and chunk c has the room that they leave. And A is at least what the stored borders demand.
        """
        menu = self.needs.inner
        order = np.argsort(menu.need, kind="stable")
        rooms = self.budget - self.needs.border * np.arange(self.count - 1)
        fitting = np.searchsorted(menu.need[order], rooms, side="right")
        fastest = np.concatenate((np.full(1, NEVER), np.minimum.accumulate(menu.ticks[order])))[fitting]
        advances = np.arange(1, self.count)
        beside = np.minimum(fastest.cumsum(), NEVER)  # of the chunks that have 0, 1, 2, … borders beside them
        later = np.append(beside[::-1][1:], 0)
        possible = advances >= min(least_advances(self.count, self.stored), self.count - 1)
        best = int((advances * (self.step + int(fastest[0])) + later)[possible].min())
        return best - max(0, int(fastest[0] - menu.ticks.min())) + int(self.needs.last.ticks.min())

    def solve(self) -> Nested | None:
        """The best nested plan; None when the budget is too small for one."""
        if not self.feasible:
            return None
        single = self._single(self.needs.inner)
        single[1] = self._single(self.instance.lean_first)[1]  # beside no other border there is only the first chunk
        reverse, reverse_split = self._reverse(single)
        whole, split = self._whole(self._single(self.needs.last), reverse)
        if whole[1, self.count] >= NEVER:
            return None
        placed = list(self._runs(split, reverse_split))
        return Nested(int(whole[1, self.count]), tuple(run for run, _ in placed), self._modes(placed))

    def _single(self, menu: Menu) -> Ints:
        """t(l) for l = 0 … stored + 1; NEVER where nothing fits."""
        times = [menu.ticks[menu.need <= self._room(stored)].min(initial=NEVER) for stored in range(self.stored + 1)]
        return np.array([*times, NEVER], np.int64)

    def _room(self, stored: int) -> int:
        return self.budget - self.needs.border * max(stored - 1, 0)

    def _reverse(self, single: Ints) -> tuple[Ints, Ints]:
        """R(n, l) and the best j; shapes (stored + 2, C + 1)."""
        best = np.full((self.stored + 2, self.count + 1), NEVER, np.int64)
        split = np.zeros(best.shape, np.int64)
        own = np.empty(self.count + 1, np.int64)  # j f + R(j, l)
        for stored in range(self.stored, 0, -1):
            most = next((j for j in (self.count, 1) if self.needs.advance(stored, j) <= self.budget), 0)
            row, behind = best[stored], best[stored + 1, ::-1].copy()
            row[1], own[1] = single[stored], single[stored] + self.step
            for n in range(2, self.count if most else 0):
                row[n], split[stored, n] = self._best_split(own, behind, n, most)
                own[n] = row[n] + n * self.step
        return best, split

    def _whole(self, last: Ints, reverse: Ints) -> tuple[Ints, Ints]:
        """W(n, l) and the best j; shapes (stored + 2, C + 1)."""
        best = np.full(reverse.shape, NEVER, np.int64)
        split = np.zeros(best.shape, np.int64)
        for stored in range(self.stored, 0, -1):
            best[stored, 1] = last[stored]
            most = next((j for j in (self.count, 1) if self.needs.forward(stored, j) <= self.budget), 0)
            behind = best[stored + 1, ::-1].copy()
            for n in range(2, self.count + 1 if most else 0):
                best[stored, n], split[stored, n] = self._best_split(reverse[stored], behind, n, most)
        return best, split

    def _best_split(self, before: Ints, behind: Ints, n: int, most: int) -> tuple[int, int]:
        """The least before[j] + rest[n - j] with 0 < j < n and j <= `most`, and its j; `behind` is rest from its end on."""
        end = min(n - 1, most)
        ways = np.add(before[1 : end + 1], behind[self.count - n + 1 : self.count - n + 1 + end], out=self._ways[:end])
        j = int(ways.argmin())
        return min(int(ways[j]), NEVER), j + 1

    def _runs(self, split: Ints, reverse_split: Ints) -> Iterator[tuple[Run, int]]:
        """The backward in order, with the borders stored meanwhile: the segments that the forward left, last first."""
        start, n, stored = 0, self.count, 1
        segments = []
        while n > 1:
            j = int(split[stored, n])
            segments.append((start, j, stored))
            start, n, stored = start + j, n - j, stored + 1
        yield Run(start, start), stored
        for segment in reversed(segments):
            yield from self._segment(*segment, reverse_split)

    def _segment(self, start: int, n: int, stored: int, split: Ints) -> Iterator[tuple[Run, int]]:
        """Reverse chunks start … start + n - 1; recursion is as deep as borders are stored."""
        while n > 1:
            j = int(split[stored, n])
            yield Run(start, start + j), stored
            yield from self._segment(start + j, n - j, stored + 1, split)
            n = j
        yield Run(start, start), stored

    def _modes(self, placed: Sequence[tuple[Run, int]]) -> tuple[ColumnMode, ...]:
        """The option of each chunk: the fastest beside the borders that are stored when it is reversed."""
        modes = [ColumnMode(0)] * self.count
        for run, stored in placed:
            if run.first == run.end:
                last, needs = run.first == self.count - 1, self.needs
                menu = needs.last if last else self.instance.lean_first if stored == 1 else needs.inner
                fits = np.flatnonzero(menu.need <= self._room(stored))
                modes[run.first] = menu.options.mode(int(fits[np.argmin(menu.ticks[fits])]), menu.column)
        return tuple(modes)
