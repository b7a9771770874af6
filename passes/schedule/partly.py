"""Plans in the race that spill the borders of the oldest chunks only: as many as pays.

Every border on the host frees its bytes on the device, and waits for a link if that is slow, or doesn't fit a small host. The
oldest borders wait longest, so they go first. With m spilled, the C - m youngest chunks are a flat plan of their own beside the
place that is set aside for a set of borders: the oldest ones, which hold nothing from the forward, leave nothing beneath it. So

    seconds(m) = flat(C - m)  +  m (fastest option that fits alone  +  what it waits for the link).

For the bound let all chunks but the last leave no border: no plan here needs less than a spilled plan with the same modes, in any
row. With few borders spilled, the others count: the flat relaxation holds when the budget grows by those that are away beside the
place that is set aside. And the link is busy with m sets (`adjcomp.passes.schedule.away`). So with m between a and b

    seconds  >=  max(bound of spilled plans, flat bound with b - 1 borders more, bound of the link for a sets).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from adjcomp.ir.actions import Action
from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.away import ToHost, emit_away
from adjcomp.passes.schedule.bound import lower_bound
from adjcomp.passes.schedule.candidates import ROUNDING, Candidate, Flat, flat_candidates, flat_minimum
from adjcomp.passes.schedule.instance import Instance, Spill

LEAST_CHUNKS = 4  # with fewer there is nothing between none and all
TRIES = 8  # numbers of spilled borders that are planned
Waits = Callable[[int], float]  # seconds that a column of an option waits


@dataclass
class Partly(Candidate):
    """The borders of the oldest chunks are on the host meanwhile. `instance`: that of plans that spill all."""

    youngest: Flat
    option: int  # of the oldest chunks
    waiting: float  # seconds, of all the oldest together
    bound: float  # seconds

    @property
    def oldest(self) -> int:
        """How many chunks spill their border."""
        return self.instance.costs.chunk_count - self.youngest.instance.costs.chunk_count

    @property
    def seconds(self) -> float:
        return (
            self.youngest.seconds
            + self.oldest * int(self.instance.menus[1].ticks[self.option]) * self.instance.tick
            + self.waiting
        )

    @property
    def bound_seconds(self) -> float:
        return min(self.bound, self.seconds)

    @property
    def recomputes(self) -> bool:
        return self.youngest.recomputes or self._mode.top_recomputed(self.instance.costs) is not None

    @property
    def _mode(self) -> ColumnMode:
        return self.instance.menus[1].options.mode(self.option, self.instance.menus[1].column)

    def actions(self) -> tuple[Action, ...]:
        modes = [self._mode] * self.oldest + self.youngest.modes()
        return emit_away(ToHost(self.instance.costs, False, self.oldest), modes)


@dataclass(frozen=True)
class Split:
    """A chunk length at which some borders can be spilled: its plans that spill none, and those that spill all."""

    resident: Instance
    spilled: Instance

    @property
    def spill(self) -> Spill:
        """The host, and the bytes of a set of borders."""
        assert self.spilled.spill is not None
        return self.spilled.spill

    @cached_property
    def most(self) -> int:
        """The most borders that are spilled here: as many as fit the host, but not all."""
        room = self.spill.host.budget_bytes // max(self.spill.border_bytes, 1)
        return min(room, self.resident.costs.chunk_count - 2)

    @property
    def possible(self) -> bool:
        """Whether there is anything between none and all."""
        return self.resident.costs.chunk_count >= LEAST_CHUNKS and self.spill.border_bytes > 0 and self.most >= 1

    def youngest(self, oldest: int) -> Instance:
        """The plans of the chunks that spill nothing, when `oldest` do, beside the place of a set of borders."""
        more = self.spill.border_bytes

        def beside(instance: Instance) -> Instance:
            inner, last = (replace(menu, need=menu.need + more) for menu in instance.menus[1:])
            inner_bound, last_bound = (replace(menu, need=menu.need + more) for menu in instance.bound_menus[1:])
            return replace(instance, menus=(inner, inner, last), bound_menus=(inner_bound, inner_bound, last_bound))

        count = self.resident.costs.chunk_count - oldest
        return replace(
            beside(self.resident),
            costs=replace(self.resident.costs, chunk_count=count),
            resident_bytes=self.resident.resident_bytes + more,
            backward_bytes=self.resident.backward_bytes + more,
            reserved_bytes=more,
        )

    def minimum(self) -> int:
        """The smallest budget."""
        return max(int(self._lean_needs().min()), flat_minimum(self.youngest(self.most)))

    def _lean_needs(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """What options of a spilled column that leave nothing need; no place for those that leave something."""
        menu = self.spilled.menus[1]
        return np.where(menu.left == 0, menu.need, np.iinfo(np.int64).max)

    def oldest_option(self, budget: int) -> int:
        """The fastest option of a chunk that spills its border and leaves nothing."""
        ticks = np.where(self._lean_needs() <= budget, self.spilled.menus[1].ticks, np.iinfo(np.int64).max)
        return int(ticks.argmin())


def splits_of(resident: Sequence[Instance], spilled: Sequence[Instance]) -> list[Split]:
    """The chunk lengths at which some borders can be spilled."""
    by_chunk = {instance.costs.chunk: instance for instance in resident}
    found = [Split(by_chunk[instance.costs.chunk], instance) for instance in spilled]
    return [split for split in found if split.possible]


def partly(split: Split, budget: int, known: float, bound: float, waits: Waits) -> Partly | None:
    """The best number of borders to spill at a chunk length; None where nothing fits.

    bound: seconds that no number goes below. waits: seconds that a spilled column of an option waits.
    """
    if split.minimum() > budget:
        return None
    option = split.oldest_option(budget)
    best: Partly | None = None
    for oldest in _numbers(split, budget):
        for flat in flat_candidates([split.youngest(oldest)], budget, known):
            found = Partly(split.spilled, flat, option, oldest * waits(option), bound)
            best = found if best is None or found.seconds < best.seconds else best
    return best


def _numbers(split: Split, budget: int) -> list[int]:
    """Numbers of borders to try: the fewest that fit, the most, and some between, closer to the fewest."""
    low, high = 1, split.most
    while low < high:
        middle = (low + high) // 2
        if flat_minimum(split.youngest(middle)) <= budget:
            high = middle
        else:
            low = middle + 1
    steps = range(TRIES)
    return sorted({low + round((split.most - low) * (2**k - 1) / (2 ** (TRIES - 1) - 1)) for k in steps})


def partly_bound(split: Split, budget: int, all_bound: float, link: Callable[[int, float], float]) -> float:
    """Seconds that no plan goes below, however many borders it spills.

    all_bound: seconds that no plan that spills all borders computes. link: seconds that no plan goes below that spills so many
    borders and computes for so long.
    """
    least, before = math.inf, 0
    for most in _numbers(split, budget):
        flat = _flat_bound(split, budget, most)
        below = _flat_bound(split, budget, most - 1)
        if below == math.inf:  # no fewer can be spilled than these
            before = max(before, most - 1)
        if flat < math.inf:
            least = min(least, link(before + 1, max(all_bound, flat)) * (1 - ROUNDING))
        before = most
    return least


def _flat_bound(split: Split, budget: int, oldest: int) -> float:
    """Seconds that no plan with so many borders spilled computes at least; infinite where none fits."""
    try:
        bound = lower_bound(split.resident, budget + max(oldest - 1, 0) * split.spill.border_bytes)
    except ValueError:  # the relaxation proves it
        return math.inf
    return bound.ticks * split.resident.tick * (1 - ROUNDING)
