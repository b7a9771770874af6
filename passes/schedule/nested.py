"""Nesting over chunks: only some borders are stored, the others are recomputed from the nearest one before them.

A segment of n chunks whose first border is stored, with l borders stored in all (its own included), is reversed by advancing j
chunks from its border, storing the border found there, reversing the n - j chunks behind it with l + 1 borders stored, dropping
that border, and reversing the first j chunks:

    R(1, l) = t(l),        R(n, l) = min over 0 < j < n of  j f + R(n - j, l + 1) + R(j, l),

where f is the time of an advance and t(l) the fastest option of a chunk that fits beside l - 1 other borders. The forward
passes every chunk once anyway and stores for nothing: W(1, l) = t_last(l), W(n, l) = min over j of W(n - j, l + 1) + R(j, l),
and W(C, 1) is the whole step. With t constant this is binomial checkpointing (Griewank and Walther's revolve); letting t depend
on l trades borders against internals of the chunk at work. Nothing is held from the forward but in the last chunk.

Where a host takes the deepest of the stored borders, t(l) is that of a chunk with fewer borders beside it. What computations
wait for the link is charged where copies start: for those of a set of borders to the host, to each segment of n > 1 chunks
whose border waits there; for those of a set that is brought back, to t(l) and t_last(l) of the chunk that is reversed
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.nesting import Run
from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.instance import Instance
from adjcomp.passes.schedule.needs import NEVER, Host, Needs

MOST_STORED = 96  # borders stored at once, or
MOST_SPLITS = 1 << 27  # this over the square of the number of chunks, where that is more


@dataclass(frozen=True)
class Nested:
    """The best nested plan of an instance."""

    ticks: int
    runs: tuple[Run, ...]  # what the backward does, in order
    modes: tuple[ColumnMode, ...]


@dataclass(frozen=True)
class Charges:
    """What is counted for copies beside the computations; ticks."""

    offload: int = 0  # for a set of borders that is offloaded
    bring: int = 0  # for a set that is brought back
    places: int | None = None  # the deepest borders whose copies are charged; None: all on the host
    hidden: float = 0.0  # share that isn't counted of computations beside copies back: while a border comes, and as it is read


FREE = Charges()


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


class Nesting:
    """The dynamic program of one instance, budget and host."""

    def __init__(self, instance: Instance, budget: int, host: Host | None = None, charges: Charges = FREE) -> None:
        self.instance, self.budget, self.charges = instance, budget, charges
        self.count = instance.costs.chunk_count
        self.needs = Needs(instance, host)
        self.feasible = budget >= self.needs.minimum()
        self.step = sum(round(t.forward_seconds / instance.tick) for t in instance.costs.layers[: self.needs.advanced_layers])
        self.stored = self._most_stored()
        charged = self.needs.places if charges.places is None else charges.places
        depths = np.arange(self.stored + 2)
        self._bring = charges.bring * ((depths >= 2) & (depths <= charged + 1))
        self._offload = charges.offload * ((depths >= 1) & (depths <= charged))
        self._counted = 1 - charges.hidden * ((depths >= 1) & (depths <= charged + 1))  # of the chunk that is reversed
        self._hidden = np.ceil(charges.hidden * self.step * ((depths >= 1) & (depths <= charged))).astype(np.int64)

    def _most_stored(self) -> int:
        """How many borders may be stored at a time."""
        least = min(int(self.needs.reversing(self.count, last=last).need.min()) for last in (False, True))
        room = max(0, self.budget - least) // max(self.needs.border, 1)
        return min(self.count, max(MOST_STORED, MOST_SPLITS // self.count**2), 1 + self.needs.places + room)

    def quick_bound(self) -> int:
        """Ticks that no nested plan computes less than.

        A border before chunk c that isn't stored at its turn has to be advanced over later. So with A advances at least c - A
        borders are stored then, and chunk c has the room that they leave. And A is at least what the stored borders demand.
        """
        menu, last = self.instance.lean_menu, self.instance.menus[2]
        order = np.argsort(menu.need, kind="stable")
        rooms = self.budget - np.array([self.needs.beside(stored) for stored in range(1, self.count)])
        fitting = np.searchsorted(menu.need[order], rooms, side="right")
        fastest = np.concatenate((np.full(1, NEVER), np.minimum.accumulate(menu.ticks[order])))[fitting]
        advances = np.arange(1, self.count)
        beside = np.minimum(fastest.cumsum(), NEVER)  # of the chunks that have 0, 1, 2, … borders beside them
        later = np.append(beside[::-1][1:], 0)
        possible = advances >= min(least_advances(self.count, self.stored), self.count - 1)
        best = int((advances * (self.step + int(fastest[0])) + later)[possible].min())
        return best - max(0, int(fastest[0] - menu.ticks.min())) + int(last.ticks.min())

    def solve(self) -> Nested | None:
        """The best nested plan; None when the budget is too small for one."""
        found = self._tables()
        if found is None:
            return None
        ticks, split, reverse_split = found
        placed = list(self._runs(split, reverse_split))
        return Nested(ticks, tuple(run for run, _ in placed), self._modes(placed))

    def least(self) -> int:
        """Ticks of the best nested plan, charges included; NEVER when the budget is too small for one."""
        found = self._tables()
        return NEVER if found is None else found[0]

    def _tables(self) -> tuple[int, Ints, Ints] | None:
        """The best ticks, and where W and R split."""
        if not self.feasible:
            return None
        reverse, reverse_split = self._reverse(self._single(last=False))
        whole, split = self._whole(self._single(last=True), reverse)
        best = int(whole[1, self.count])
        return (best, split, reverse_split) if best < NEVER else None

    def _single(self, *, last: bool) -> Ints:
        """t(l) for l = 0 … stored + 1; NEVER where nothing fits."""
        times = []
        for stored in range(self.stored + 1):
            menu = self.needs.reversing(stored, last=last)
            times.append(menu.ticks[menu.need <= self._room(stored)].min(initial=NEVER))
        found = np.array([*times, NEVER], np.int64)
        counted = np.where(found < NEVER, np.floor(found * self._counted), NEVER) if self.charges.hidden else found
        return np.minimum(counted.astype(np.int64) + self._bring, NEVER)

    def _room(self, stored: int) -> int:
        return self.budget - self.needs.beside(stored)

    def _reverse(self, single: Ints) -> tuple[Ints, Ints]:
        """R(n, l) and the best j; shapes (stored + 2, C + 1)."""
        most = self._longest(self.needs.advance)
        best, rest, split = self._empty(single)
        own = np.full(best.shape, NEVER, np.int64)  # j f + R(j, l), for the j that fit
        own[:, 1] = np.where(most >= 1, single + self.step - self._hidden, NEVER)
        for n in range(2, self.count):
            best[:-1, n], split[:-1, n] = _best_split(own, rest, n)
            rest[:, n] = np.minimum(best[:, n] + self._offload, NEVER)
            own[:, n] = np.where(most >= n, best[:, n] + n * self.step - self._hidden, NEVER)
        return best, split

    def _whole(self, last: Ints, reverse: Ints) -> tuple[Ints, Ints]:
        """W(n, l), with the copy of its border, and the best j; shapes (stored + 2, C + 1)."""
        fits = self._longest(self.needs.forward)[:, None] >= np.arange(self.count + 1)
        before = np.where(fits, reverse, NEVER)
        best, rest, split = self._empty(last)
        for n in range(2, self.count + 1):
            best[:-1, n], split[:-1, n] = _best_split(before, rest, n)
            rest[:, n] = np.minimum(best[:, n] + self._offload, NEVER)
        return rest, split

    def _empty(self, single: Ints) -> tuple[Ints, Ints, Ints]:
        """Tables for best values, for the same with the copy of the border, and for splits, filled for n = 1."""
        best = np.full((self.stored + 2, self.count + 1), NEVER, np.int64)
        best[:, 1] = single
        return best, best.copy(), np.zeros(best.shape, np.int64)

    def _longest(self, need: Callable[[int, int], int]) -> Ints:
        """How many chunks can be passed beside each number of stored borders: all, one or none; `need` says what that takes."""
        fitting = (next((j for j in (self.count, 1) if need(stored, j) <= self.budget), 0) for stored in range(self.stored + 1))
        return np.array([*fitting, 0])

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
                menu = self.needs.reversing(stored, last=run.first == self.count - 1)
                fits = np.flatnonzero(menu.need <= self._room(stored))
                modes[run.first] = menu.options.mode(int(fits[np.argmin(menu.ticks[fits])]), menu.column)
        return tuple(modes)


def _best_split(before: Ints, rest: Ints, n: int) -> tuple[Ints, Ints]:
    """The least before[l, j] + rest[l + 1, n - j] with 0 < j < n, and its j, for every l but the last row."""
    ways = before[:-1, 1:n] + rest[1:, n - 1 : 0 : -1]
    found = ways.argmin(axis=1)
    return np.minimum(ways[np.arange(len(ways)), found], NEVER), found + 1
