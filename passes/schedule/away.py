"""Plans in the race whose borders are put away (`adjcomp.passes.away`): spilled to the host, all or some of them
(`adjcomp.passes.schedule.partly`), or rounded to lower precision.

A column that leaves no border is a column of a flat plan with borders of no size, beside the place that is set aside for them;
one with rounded borders leaves those. So menus, bounds and searches are those of flat plans. What is new with a host is waiting:
a drop that waits for its copy to the host, a tile that waits for its border. It shows the same in every column of a kind, so it
is measured on short sequences of the inner columns' most frequent mode; the plan that wins is timed whole.

No spilled plan goes below what its link needs either. Let L be the seconds that a link direction is busy with borders that every
plan fetches: of layers whose VJP reads the incoming state. The last offload ends before the last chunk but one has passed, as its
value is dropped there, and all fetches come after the turn. So with F the forward's seconds, at least F_low and at most F_high,
and T the sum of all computations,

    seconds >= max(F, L) + max(T - F, L)  >=  max(T,  max(F_low, L) + L,  L + T - F_high).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum

import numpy as np

from adjcomp.ir.actions import Action
from adjcomp.ir.plan import HostTier, Share
from adjcomp.ir.values import has_adjoint
from adjcomp.passes.away import LIKE, HostTimes, Rounded, ToHost, emit_away
from adjcomp.passes.schedule.bound import Bound, lower_bound
from adjcomp.passes.schedule.candidates import ROUNDING, Candidate, Flat, flat_candidates
from adjcomp.passes.schedule.greedy import Choice
from adjcomp.passes.schedule.instance import Instance, Spill, build_instance, fetching_ahead
from adjcomp.passes.schedule.partly import Split, partly, partly_bound

LEAST_CHUNKS = 3  # with fewer there is nothing to spill
NO_WAIT = 1e-4  # of a step: waiting for borders that is not worth a second set of them


@dataclass
class Spilled(Flat):
    """Every border but the last is on the host meanwhile."""

    _waits: dict[int, float] = field(default_factory=dict)  # seconds by the option of inner columns

    @property
    def spill(self) -> Spill:
        """Of the instance."""
        assert self.instance.spill is not None
        return self.instance.spill

    @property
    def seconds(self) -> float:
        return self.choice.ticks * self.instance.tick + self.waiting()

    @property
    def computing(self) -> float:
        """Seconds that no plan of the instance computes at least."""
        return super().bound_seconds

    @property
    def bound_seconds(self) -> float:
        sets = self.instance.costs.chunk_count - 1
        return max(self.computing, link_bound(self.instance, self.spill.host, self.computing, sets) * (1 - ROUNDING))

    def actions(self) -> tuple[Action, ...]:
        return emit_away(ToHost(self.instance.costs, self.spill.ahead), self.modes())

    def waiting(self) -> float:
        """Seconds that computations wait for copies, from short sequences of the most frequent mode."""
        option = Counter(self.choice.options[1:-1]).most_common(1)[0][0]
        if option not in self._waits:
            short, longer = (self._waited(option, min(self.instance.costs.chunk_count, n)) for n in (LIKE, 2 * LIKE))
            more = self.instance.costs.chunk_count - 2 * LIKE
            self._waits[option] = longer + max(0, more) * (longer - short) / LIKE
        return self._waits[option]

    def _waited(self, option: int, chunks: int) -> float:
        """Seconds of waiting in a sequence of `chunks` chunks of one mode."""
        costs = replace(self.instance.costs, chunk_count=chunks)
        mode = self.instance.menus[1].options.mode(option, self.instance.menus[1].column)
        timed = HostTimes(costs, self.spill.host).run(emit_away(ToHost(costs, self.spill.ahead), [mode] * chunks))
        return timed.now - timed.working


def spilled_instances(instances: Sequence[Instance], device: str, host: HostTier) -> list[Instance]:
    """The instances with borders on the host, where a set of them fits there."""
    found = []
    for instance in instances:
        costs = instance.costs
        if costs.chunk_count >= LEAST_CHUNKS and 0 < sum(tile.carry_bytes for tile in costs.layers) <= host.budget_bytes:
            found.append(build_instance(costs, Share(device, 0, costs.resident_bytes, costs.turn_bytes, host=host)))
    return found


def holds_all(instance: Instance) -> bool:
    """Whether all borders of a spilled instance fit the host, but that of the last chunk."""
    assert instance.spill is not None
    return instance.spill.border_bytes * (instance.costs.chunk_count - 1) <= instance.spill.host.budget_bytes


def partly_candidates(splits: Sequence[Split], flat: Sequence[Flat], budget: int, known: float) -> tuple[list[Candidate], float]:
    """Plans that spill some borders, at each chunk length where they may be faster than `known` seconds and the plans in `flat`;
    and a bound on those of all lengths, in seconds.
    """
    best = min([known, *(candidate.seconds for candidate in flat)])
    proven = {c.instance.costs.chunk: c.computing for c in flat if isinstance(c, Spilled) and not c.spill.ahead}
    found: list[Candidate] = []
    least = math.inf
    for split in splits:
        computing = proven.get(split.resident.costs.chunk, _computing(split.spilled, budget))
        bound = partly_bound(split, budget, computing, partial(_link, split))
        least = min(least, bound)
        if bound < best * (1 - NO_WAIT):
            made = partly(split, budget, best, bound, partial(_waits_a_column, split))
            found += [] if made is None else [made]
    return found, least


def _computing(instance: Instance, budget: int) -> float:
    """Seconds that no plan of an instance computes at least; infinite where none fits."""
    try:
        return lower_bound(instance, budget).ticks * instance.tick * (1 - ROUNDING)
    except ValueError:  # the relaxation proves it
        return math.inf


def _waits_a_column(split: Split, option: int) -> float:
    """Seconds that a spilled column of an option waits where all are alike."""
    alike = Spilled(split.spilled, Choice((option,) * split.spilled.costs.chunk_count, 0), Bound(0.0, np.zeros(0)))
    return alike.waiting() / (split.spilled.costs.chunk_count - 1)


def _link(split: Split, sets: int, computing: float) -> float:
    """Seconds that no plan goes below that spills so many sets of borders."""
    return link_bound(split.resident, split.spill.host, computing, sets)


def spilled_candidates(instances: Sequence[Instance], budget: int, known: float) -> list[Flat]:
    """Bounds and constructive plans of spilled instances, and those with a second set of borders where the first makes wait."""
    found: list[Flat] = []
    for flat in flat_candidates([instance for instance in instances if holds_all(instance)], budget, known):
        one = Spilled(flat.instance, flat.choice, flat.bound)
        promising = all(one.bound_seconds < other.seconds for other in found)
        found.append(one)
        if promising and one.waiting() > NO_WAIT * one.seconds:
            wider = fetching_ahead(flat.instance)
            found += [Spilled(wider, other.choice, other.bound) for other in flat_candidates([wider], budget)]
    return found


@dataclass
class Narrowed(Flat):
    """Borders are rounded to lower precision meanwhile, all but the last."""

    def actions(self) -> tuple[Action, ...]:
        return emit_away(Rounded(self.instance.costs), self.modes())


def rounded_instances(instances: Sequence[Instance], device: str) -> list[Instance]:
    """The instances with borders in lower precision, where that takes less."""
    found = []
    for instance in instances:
        costs = instance.costs
        if costs.chunk_count >= LEAST_CHUNKS and any(tile.narrow_bytes for tile in costs.layers):
            found.append(build_instance(costs, Share(device, 0, costs.resident_bytes, costs.turn_bytes), rounded=True))
    return found


def rounded_candidates(instances: Sequence[Instance], budget: int, known: float) -> list[Flat]:
    """Bounds and constructive plans of instances with rounded borders."""
    return [Narrowed(flat.instance, flat.choice, flat.bound) for flat in flat_candidates(instances, budget, known)]


def link_bound(instance: Instance, host: HostTier, computing: float, sets: int) -> float:
    """Seconds that no plan goes below that spills the borders of `sets` chunks, given that computations take `computing` at least
    (module docstring).
    """
    costs = instance.costs
    borders = [t.carry_bytes for t in costs.layers if has_adjoint(t) and t.reads_carry]
    busy = sets * fsum(host.seconds(size) for size in borders)
    tables = [costs.tile(k, c) for c in (0, costs.chunk_count - 1) for k in range(costs.head + 1)]
    weights = [costs.chunk_count - 1] * (costs.head + 1) + [1] * (costs.head + 1)
    low = fsum(w * min(t.forward_seconds, t.keep_seconds) for w, t in zip(weights, tables, strict=True))
    high = fsum(w * max(t.forward_seconds, t.keep_seconds) for w, t in zip(weights, tables, strict=True))
    return max(computing, max(low, busy) + busy, busy + computing - high)
