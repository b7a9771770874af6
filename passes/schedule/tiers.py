"""Nested plans in the race whose stored borders are in two tiers: the deepest on the host, the others on the device.

Stored borders are a stack, and each waits until all that were stored after it are gone: so those at the bottom wait longest and
go to the host. With p places there the dynamic program of `adjcomp.passes.schedule.nested` is the same, but for the room that a
chunk finds. Were copies to take no time, it would be exact, and more places never worse; so with all places that the host has

    computing(p)  >=  computing(all places)        for every p,

which is the bound as long as the link is fast. What computations wait for it shows when the plan is timed. Where that is much,
borders are brought ahead, waiting is charged on average and the program solved again, and fewer places are tried.

With a slow link the bound counts transfers as well. A border comes while one chunk is reversed, and is there when the next
sweep has read it. So N sets of borders that take X seconds each fit into the N backwards beside them, of t_i seconds, the first
chunks of the advances that read one, of f seconds, and chunk 0's backward, which reads the last one; else computations wait.
For every w between 0 and 1

    seconds  >=  computing  +  w (sum of (X - t_i)  -  f advances  -  t(chunk 0)),

and the least of the right side is found by the same program, which counts 1 - w of those computations and w X for each set. For
p in a range, it has the room of the most places and charges the copies of the fewest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from adjcomp.ir.actions import Action, Turn
from adjcomp.ir.plan import HostTier
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.passes.away import HostTimes
from adjcomp.passes.nesting import emit_nested
from adjcomp.passes.schedule.candidates import ROUNDING, Candidate
from adjcomp.passes.schedule.instance import Instance
from adjcomp.passes.schedule.needs import Host
from adjcomp.passes.schedule.nested import FREE, Charges, Nested, Nesting

LEAST_CHUNKS = 3  # of a nested plan
NO_WAIT = 1e-3  # of a step: waiting that is not worth another plan, or another bound
WEIGHTS = (0.5, 0.9, 1.0)  # of transfers in the bound


@dataclass
class Tiered(Candidate):
    """The deepest of the stored borders are on the host meanwhile. `instance`: that of plans that spill all."""

    nested: Nested
    host: Host
    bound: float = 0.0  # seconds

    @property
    def seconds(self) -> float:
        return self.timed.now

    @property
    def bound_seconds(self) -> float:
        return min(self.bound, self.seconds)

    @property
    def recomputes(self) -> bool:
        return True

    @property
    def waiting(self) -> float:
        """Seconds that computations wait for copies."""
        return self.timed.now - self.timed.working

    @cached_property
    def timed(self) -> HostTimes:
        """The plan's run."""
        return HostTimes(self.instance.costs, self._link).run(self.actions())

    @cached_property
    def _written(self) -> tuple[Action, ...]:
        return emit_nested(self.instance.costs, self.nested.modes, self.nested.runs, self.host.tier)

    def actions(self) -> tuple[Action, ...]:
        return self._written

    def average(self, tick: float) -> Charges:
        """What a set of borders waits on average in each direction, ticks."""
        actions = self.actions()
        turn = next(index for index, action in enumerate(actions) if isinstance(action, Turn))
        forward = HostTimes(self.instance.costs, self._link).run(actions[:turn])
        out, back = forward.now - forward.working, self.waiting - (forward.now - forward.working)
        layers = sum(size > 0 for size in _border_sizes(self.instance))
        early = sum(isinstance(action, Offload) for action in actions[:turn]) / layers
        brought = sum(isinstance(action, Fetch | Load) for action in actions) / layers
        return Charges(round(out / max(early, 1) / tick), round(back / max(brought, 1) / tick))

    @property
    def _link(self) -> HostTier:
        return link_of(self.host)


@dataclass(frozen=True)
class Pair:
    """A chunk length at which a nested plan may use the host: its plans that spill nothing, and the host with all its places."""

    resident: Instance
    host: Host

    def nesting(self, budget: int, places: int, charges: Charges = FREE, *, ahead: bool = False) -> Nesting:
        """The dynamic program with fewer places."""
        host = Host(self.host.spilled, places)
        return Nesting(self.resident, budget, host.brought_ahead() if ahead else host, charges)


def pairs_of(resident: Sequence[Instance], spilled: Sequence[Instance]) -> list[Pair]:
    """The chunk lengths at which a nested plan may use the host."""
    by_chunk = {instance.costs.chunk: instance for instance in resident}
    found = []
    for instance in spilled:
        assert instance.spill is not None
        count, size = instance.costs.chunk_count, instance.spill.border_bytes
        if count >= LEAST_CHUNKS and size > 0:
            places = min(instance.spill.host.budget_bytes // size, count - 1)
            found.append(Pair(by_chunk[instance.costs.chunk], Host(instance, places)))
    return found


def tiered_candidates(pairs: Sequence[Pair], budget: int, known: float) -> list[Tiered]:
    """Nested plans in two tiers of all chunk lengths at which one could be faster than `known` seconds, most promising first."""
    found: list[Tiered] = []
    whole = [(pair, pair.nesting(budget, pair.host.places)) for pair in pairs]
    promises = [(n.quick_bound() * n.instance.tick, n.instance.costs.chunk, pair, n) for pair, n in whole if n.feasible]
    for promise, _, pair, nesting in sorted(promises, key=lambda row: row[:2]):
        best = min([known, *(candidate.seconds for candidate in found)])
        nested = nesting.solve() if promise * (1 - ROUNDING) < best else None
        if nested is not None and nested.ticks * nesting.instance.tick < best:
            found.append(_best(pair, budget, Tiered(pair.host.spilled, nested, pair.host)))
    return found


def _best(pair: Pair, budget: int, first: Tiered) -> Tiered:
    """The fastest of some plans of a chunk length, and a bound on all; `first` is the best were copies to take no time."""
    tick = pair.resident.tick
    best, bound = first, first.nested.ticks * tick * (1 - ROUNDING)
    if first.waiting > NO_WAIT * first.seconds:
        for other in _others(pair, budget, first):
            best = other if other.seconds < best.seconds else best
        bound = _bound(pair, budget, best.seconds, bound)
    best.bound = bound
    return best


def _others(pair: Pair, budget: int, first: Tiered) -> Iterator[Tiered]:
    """Plans that may wait less than the first: they bring borders ahead, count what is waited for, or use fewer places."""
    charges = first.average(pair.resident.tick)
    places = pair.host.places
    tries = [(places, FREE, True), *((places >> half, charges, False) for half in range(places.bit_length()))]
    for count, priced, ahead in tries:
        nested = pair.nesting(budget, count, priced, ahead=ahead).solve()
        if nested is not None:
            host = Host(pair.host.spilled, count)
            host = host.brought_ahead() if ahead else host
            yield Tiered(host.spilled, nested, host)


def _bound(pair: Pair, budget: int, seconds: float, computing: float) -> float:
    """Seconds that no plan goes below: for ranges of places, the most that any weight of transfers proves, or `computing`."""
    least, most = seconds, 1
    while least > computing * (1 + NO_WAIT):
        places = min(most, pair.host.places)
        proven = max(_weighted(pair, budget, places, most // 2 + 1, weight) for weight in WEIGHTS)
        least = min(least, max(computing, proven))
        if most >= pair.host.places:
            break
        most *= 2
    return least


def _weighted(pair: Pair, budget: int, places: int, fewest: int, weight: float) -> float:
    """The least of the right side (module docstring) with `places` on the host, of which `fewest` are charged; seconds."""
    tick, link = pair.resident.tick, link_of(pair.host)
    moving = fsum(link.seconds(size) for size in _border_sizes(pair.resident) if size)
    charges = Charges(bring=math.floor(weight * moving / tick), places=fewest, hidden=weight)
    return pair.nesting(budget, places, charges).least() * tick * (1 - ROUNDING)


def link_of(host: Host) -> HostTier:
    """The host's tier in the plan."""
    assert host.spilled.spill is not None
    return host.spilled.spill.host


def _border_sizes(instance: Instance) -> list[int]:
    """Bytes of a border by layer."""
    return [tile.carry_bytes for tile in instance.costs.layers]
