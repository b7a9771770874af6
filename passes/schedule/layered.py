"""Layer-major plans in the race: which segments of layers, and which of them hold their internals.

A dynamic program over the highest layer b of a segment. What the layers up to b leave is one number L, so its states are pairs
(L, time) of which no other is as good in both; a segment that follows adds its D to L and its seconds to the time if
L + need <= B (`passes.schedule.segments`). It is exact, and so its own bound; where it would have too many states, they are
merged into better ones for the bound, and some are left out for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import bottom_layer
from adjcomp.passes.layermajor import Segment, emit_layer_major
from adjcomp.passes.schedule.candidates import ROUNDING, Candidate
from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.instance import Instance
from adjcomp.passes.schedule.segments import SegmentNeeds, segment_needs

MOST_STATES = 512  # of the dynamic program, at one layer
MOST_LAYERS = 160  # of a stack for which there are layer-major plans
NEVER = 1 << 60  # bytes or ticks of what can't be


Cost = Callable[[Ints, Ints, Ints, Ints], Ints]  # of states: their cost, what they left, and the next segment's need and ticks


@dataclass
class Layered(Candidate):
    """Layer-major: segment after segment."""

    segments: tuple[Segment, ...]
    ticks: int
    bound_ticks: int

    @property
    def seconds(self) -> float:
        return self.ticks * self.instance.tick

    @property
    def bound_seconds(self) -> float:
        return self.bound_ticks * self.instance.tick * (1 - ROUNDING)

    @property
    def recomputes(self) -> bool:
        return not all(segment.held for segment in self.segments)

    def actions(self) -> tuple[Action, ...]:
        return emit_layer_major(self.instance.costs, self.segments)


def is_possible(costs: StackCosts) -> bool:
    """Whether layer-major plans are made for a stack: several chunks, gradients known by layer, each layer with a cotangent of
    its own, and no VJP that reads what its tile made.
    """
    several = costs.chunk_count > 1 and bool(costs.gradients) and not costs.shares_cotangent
    possible = several and bottom_layer(costs) < costs.head < MOST_LAYERS
    return possible and not any(tile.has_vjp and tile.reads_output for tile in costs.layers)


def layered_candidates(layerings: Sequence[Layering], budget: int, known: float) -> list[Layered]:
    """Layer-major plans of the chunk lengths at which one may be faster than `known` seconds, most promising first."""
    found: list[Layered] = []
    promises = [(layering.quick_bound(budget) * layering.instance.tick * (1 - ROUNDING), layering) for layering in layerings]
    for promise, layering in sorted(promises, key=lambda pair: (pair[0], pair[1].instance.costs.chunk)):
        if promise < min([known, *(candidate.seconds for candidate in found)]):
            made = layering.solve(budget)
            found += [] if made is None else [made]
    return found


@dataclass(frozen=True)
class _States:
    """The states after some layers: bytes left, cost, and where each came from: first layer of the last segment, state, held."""

    left: Ints
    cost: Ints
    origin: Ints  # shape (3, states)

    def take(self, index: Ints) -> _States:
        return _States(self.left[index], self.cost[index], self.origin[:, index])


class Layering:
    """The layer-major plans of one instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance, costs = instance, instance.costs
        self.bottom = bottom_layer(costs)
        gradients = sum(gradient.accumulator_bytes for gradient in costs.gradients)
        self.beside = instance.backward_bytes - instance.resident_bytes - gradients
        self.ticks = [_ticks(instance, held) for held in (False, True)]

    @cached_property
    def needs(self) -> list[SegmentNeeds]:
        """Of segments that recompute their internals, and of those that hold them."""
        resident = self.instance.resident_bytes
        return [segment_needs(self.instance.costs, resident, self.beside, held=held) for held in (False, True)]

    def minimum(self) -> tuple[int, tuple[Segment, ...]]:
        """The smallest budget, and segments that have it."""

        def cost(before: Ints, left: Ints, need: Ints, ticks: Ints) -> Ints:
            return np.asarray(np.maximum(before, left + need))

        found = self._solve(cost, _all_states)
        assert found is not None
        return found

    def quick_bound(self, budget: int) -> int:
        """Ticks that no plan goes below. At the turn there are all borders that a VJP reads, everything that is held, and the
        residual chunks that held tiles read, or those between two segments.
        """
        costs = self.instance.costs
        layers = range(self.bottom, costs.head + 1)
        x = [self._bytes(k, "stream_bytes") for k in range(costs.head + 1)]
        keep = [self._bytes(k, "keep_bytes") for k in layers]
        borders = sum((costs.chunk_count - 1) * t.carry_bytes for t in costs.layers[self.bottom :] if t.reads_carry)
        room = budget - self.instance.resident_bytes - self.beside - borders
        beside = [x[k - 1] if costs.layers[k].reads_input and k > 0 else 0 for k in layers]
        alone = self._knapsack(room - min(x[self.bottom : costs.head]), keep)
        return max(alone, self._knapsack(room, [a + b for a, b in zip(keep, beside, strict=True)]))

    def _bytes(self, layer: int, name: str) -> int:
        """Of all chunks."""
        costs = self.instance.costs
        full, last = getattr(costs.layers[layer], name), getattr(costs.last_layers[layer], name)
        return int((costs.chunk_count - 1) * full + last)

    def _knapsack(self, room: int, sizes: Sequence[int]) -> int:
        """Ticks of a step that holds what saves most for its size, from the lowest layer with a VJP on; parts of layers count."""
        if room < 0:
            return NEVER
        saved = np.maximum(0, self.ticks[0] - self.ticks[1])
        total = float(self.ticks[0].sum() - saved[: self.bottom].sum())
        ways = sorted(zip(saved[self.bottom :].tolist(), sizes, strict=True), key=lambda way: -way[0] / max(way[1], 1))
        for worth, size in ways:
            share = min(1.0, room / size) if size > 0 else 1.0
            total -= share * worth
            room -= int(share * size)
        return int(total * (1 - ROUNDING)) - 1

    def solve(self, budget: int) -> Layered | None:
        """The fastest plan; None where none fits."""

        def cost(before: Ints, left: Ints, need: Ints, ticks: Ints) -> Ints:
            return np.where(left + need <= budget, before + ticks, NEVER)

        thin = _Thin()
        found = self._solve(cost, thin)
        if found is None:
            return None
        least = self._solve(cost, _merged) if thin.left_out else found
        assert least is not None  # better states lead wherever the others do
        return Layered(self.instance, found[1], found[0], min(found[0], least[0]))

    def _solve(self, cost: Cost, fewer: Callable[[_States], _States]) -> tuple[int, tuple[Segment, ...]] | None:
        """The least cost of all layers, and its segments."""
        head = self.instance.costs.head
        start = _States(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((3, 1), np.int64))
        nothing = start.take(np.zeros(0, np.int64))
        states = [start, *(nothing for _ in range(self.bottom))]  # by number of layers
        for last in range(self.bottom, head + 1):
            firsts = range(1 if last == head else 0, last + 1)
            below = [states[first] for first in firsts]
            left, before = (np.concatenate([getattr(state, name) for state in below]) for name in ("left", "cost"))
            first = np.repeat(np.array(firsts), [len(state.left) for state in below])
            index = np.concatenate([np.arange(len(state.left)) for state in below])
            parts = [self._extended(cost, _States(left, before, np.stack((first, index, index))), last, held) for held in (0, 1)]
            states.append(fewer(_undominated(parts)))
        end = states[-1]
        if not len(end.cost):
            return None
        best = int(end.cost.argmin())
        return int(end.cost[best]), tuple(self._segments(states, best))

    def _extended(self, cost: Cost, below: _States, last: int, held: int) -> _States:
        """States below with another segment, up to `last`; `below.origin`: its first layer, and the index of the state there."""
        first, index, _ = below.origin
        needs, ticks = self.needs[held], np.append(0, np.cumsum(self.ticks[held]))
        costs = cost(below.cost, below.left, needs.need[first, last], ticks[last + 1] - ticks[first])
        fits = np.flatnonzero(costs < NEVER)
        origin = np.stack((first[fits], index[fits], np.full(len(fits), held)))
        return _States(below.left[fits] + needs.left[first, last][fits], costs[fits], origin)

    def _segments(self, states: Sequence[_States], index: int) -> list[Segment]:
        """The segments that led to a state of all layers, lowest first."""
        found: list[Segment] = []
        last = len(states) - 2
        while last >= 0:
            first, index, held = (int(number) for number in states[last + 1].origin[:, index])
            found.append(Segment(first, last, bool(held)))
            last = first - 1
        return found[::-1]


def _ticks(instance: Instance, held: bool) -> Ints:
    """Ticks of all chunks by layer."""
    costs, bottom = instance.costs, bottom_layer(instance.costs)
    found = []
    for k in range(costs.head + 1):
        ticks = 0
        for count, tile in ((costs.chunk_count - 1, costs.layers[k]), (1, costs.last_layers[k])):
            forward, keep, vjp = (
                round(seconds / instance.tick) for seconds in (tile.forward_seconds, tile.keep_seconds, tile.adjoint_seconds)
            )
            again = keep + vjp if k >= bottom else forward
            ticks += count * ((keep + vjp if k >= bottom else forward) if held else forward + again)
        found.append(ticks)
    return np.array(found, np.int64)


def _undominated(parts: Sequence[_States]) -> _States:
    """The states that no other beats in both numbers, by bytes left."""
    left, costs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("left", "cost"))
    whole = _States(left, costs, np.concatenate([part.origin for part in parts], axis=1))
    order = np.lexsort((costs, left))
    lowest = np.minimum.accumulate(costs[order])
    better = np.ones(len(order), bool)
    better[1:] = costs[order][1:] < lowest[:-1]
    return whole.take(order[better])


def _all_states(states: _States) -> _States:
    return states


class _Thin:
    """Leaves some states out where they are too many, never the one that leaves least: so what fits is found."""

    def __init__(self) -> None:
        self.left_out = False

    def __call__(self, states: _States) -> _States:
        if len(states.left) <= MOST_STATES:
            return states
        self.left_out = True
        ends = [int(group[-1]) for group in np.array_split(np.arange(len(states.left)), MOST_STATES)]
        return states.take(np.unique(np.array([0, *ends])))


def _merged(states: _States) -> _States:
    """States as good as those of each run of neighbours, where they are too many: cost falls as what is left rises."""
    if len(states.left) <= MOST_STATES:
        return states
    groups = np.array_split(np.arange(len(states.left)), MOST_STATES)
    first, last = (np.array([group[end] for group in groups]) for end in (0, -1))
    return _States(states.left[first], states.cost[last], states.origin[:, last])
