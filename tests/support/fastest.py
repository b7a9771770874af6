"""The fastest schedule of a tiny placement problem, over all partitions: what plans can't beat and bounds may not pass.

Two numbers: no schedule is faster than the first, and one takes the second. They are equal where the search came to its end.

For each way to give contiguous layers to the stages, CP-SAT orders the forwards, VJPs and recomputations of all tiles on their
devices: with what each waits for, with the bytes of internals, borders and first adjoint states, and without all that a real
plan needs besides (residual chunks, workspace, room for transfers). So its optimum is below every plan of the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from adjcomp.ir.values import has_adjoint, has_carry
from adjcomp.passes.place.partition import least_internals
from adjcomp.passes.place.problem import Problem

TICKS = 1 << 16  # of a second
EFFORT = 0.2  # deterministic seconds of search for a partition
Tile = tuple[int, int]  # layer, chunk


def fastest(problem: Problem, shape: tuple[int, int]) -> tuple[float, float]:
    """Seconds of the fastest schedule on (stages, lanes); infinite where there is none."""
    return _least(_Schedule(problem, owner, sweeps=False) for owner in _partitions(problem.head + 1, shape))


def fastest_sweeps(problem: Problem) -> tuple[float, float]:
    """Seconds of the fastest schedule by time: every device takes one layer after the other over its range, and holds nothing."""
    owners = _ranges(problem.costs.chunk_count, len(problem.sites))
    return _least(_Schedule(problem, owner, sweeps=True) for owner in owners)


def _least(schedules: Iterable[_Schedule]) -> tuple[float, float]:
    lower, upper = zip(*(schedule.solve() for schedule in schedules), strict=True)
    return min(lower), min(upper)


def _partitions(layers: int, shape: tuple[int, int]) -> Iterator[Callable[[int, int], int]]:
    """The device of each (layer, chunk), for each way to cut the layers into stages, some of them empty."""
    stages, lanes = shape
    for cuts in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        stage = [sum(cut <= layer for cut in cuts) for layer in range(layers)]
        yield lambda layer, chunk, stage=stage: stage[layer] * lanes + chunk % lanes  # type: ignore[misc]


def _ranges(chunks: int, devices: int) -> Iterator[Callable[[int, int], int]]:
    """The device of each (layer, chunk), for each way to cut the chunks into ranges, some of them empty."""
    for cuts in itertools.combinations_with_replacement(range(chunks + 1), devices - 1):
        yield lambda layer, chunk, cuts=cuts: sum(cut <= chunk for cut in cuts)  # type: ignore[misc]


@dataclass
class _Schedule:
    """One partition as a model for CP-SAT. sweeps: a device takes one layer after the other and recomputes all."""

    problem: Problem
    owner: Callable[[int, int], int]
    sweeps: bool
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    busy: dict[int, list[cp_model.IntervalVar]] = field(default_factory=dict)
    again: dict[Tile, cp_model.IntVar] = field(default_factory=dict)
    held: dict[int, list[tuple[cp_model.IntervalVar, int]]] = field(default_factory=dict)

    def solve(self) -> tuple[float, float]:
        """Seconds that no schedule goes below, and those of the best one found."""
        costs = self.problem.costs
        self.limit = 8 * sum(self._ticks(t.keep_seconds + t.adjoint_seconds, 0.25) for t in costs.layers) * costs.chunk_count
        self.tiles = list(itertools.product(range(costs.head + 1), range(costs.chunk_count)))
        self.forward = {tile: self._time(tile, "forward_seconds") for tile in self.tiles}
        self.back = {t: self._time(t, "adjoint_seconds") for t in self.tiles if costs.tile(*t).has_vjp}
        self.turns = {device: self.model.new_int_var(0, self.limit, "") for device in {self.owner(*t) for t in self.tiles}}
        for tile in self.tiles:
            self._wait(tile)
        for tile in self.back:
            self._internals(tile)
        for lower, upper in itertools.permutations(self.tiles, 2) if self.sweeps else ():
            if lower[0] + 1 == upper[0] and self.owner(*lower) == self.owner(*upper):
                self._sweep(lower, upper)
        for device in self.turns if self.sweeps else ():
            order = sorted((tile for tile in self.back if self.owner(*tile) == device), reverse=True)
            for tile, following in pairwise(order):  # a tile is recomputed when the VJP before its own is over
                self.model.add(self.again[following] >= self.back[tile][1])
        end = self.model.new_int_var(0, self.limit, "")
        for _, last in (*self.forward.values(), *self.back.values()):
            self.model.add(end >= last)
        for device in self.turns:
            self._device(device, end)
        self.model.minimize(end)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = EFFORT
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return math.inf, math.inf
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return solver.best_objective_bound / TICKS, solver.objective_value / TICKS if found else math.inf

    def _ticks(self, seconds: float, speed: float) -> int:
        return math.floor(seconds / speed * TICKS)

    def _time(self, tile: Tile, name: str) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        """Start and end of a piece of work, on its device."""
        device = self.owner(*tile)
        size = self._ticks(getattr(self.problem.costs.tile(*tile), name), self.problem.sites[device].speed)
        start, end = self.model.new_int_var(0, self.limit, ""), self.model.new_int_var(0, self.limit, "")
        self.busy.setdefault(device, []).append(self.model.new_interval_var(start, size, end, ""))
        return start, end

    def _way(self, a: Tile, b: Tile, size: int) -> int:
        source, target = self.owner(*a), self.owner(*b)
        return 0 if source == target else self._ticks(self.problem.wiring.seconds(source, target, size), 1.0)

    def _wait(self, tile: Tile) -> None:
        """What the forward and the VJP of a tile wait for."""
        costs, (layer, chunk) = self.problem.costs, tile
        cost = costs.tile(layer, chunk)
        if layer > 0:
            below = (layer - 1, chunk)
            here = self.forward[below][1] + self._way(below, tile, costs.tile(*below).stream_bytes)
            self.model.add(self.forward[tile][0] >= here)
        if chunk > 0 and has_carry(cost):
            before = (layer, chunk - 1)
            self.model.add(self.forward[tile][0] >= self.forward[before][1] + self._way(before, tile, cost.carry_bytes))
        turn = self.turns[self.owner(*tile)]
        self.model.add(turn >= self.forward[tile][1])
        if tile not in self.back:
            return
        self.model.add(self.back[tile][0] >= turn)
        if layer < costs.head:
            above = (layer + 1, chunk)
            self.model.add(self.back[tile][0] >= self.back[above][1] + self._way(above, tile, cost.cotangent_bytes))
        if chunk + 1 < costs.chunk_count and has_adjoint(cost):
            after = (layer, chunk + 1)
            self.model.add(self.back[tile][0] >= self.back[after][1] + self._way(after, tile, cost.adjoint_bytes))

    def _sweep(self, lower: Tile, upper: Tile) -> None:
        """A device is done with a layer before it takes the next one."""
        self.model.add(self.forward[upper][0] >= self.forward[lower][1])
        if lower in self.back and upper in self.back:
            self.model.add(self.back[lower][0] >= self.back[upper][1])

    def _internals(self, tile: Tile) -> None:
        """A tile's internals are live from its forward on, or from a recomputation on; and its border from the forward on."""
        costs, device = self.problem.costs, self.owner(*tile)
        cost, last = costs.tile(*tile), tile[1] == costs.chunk_count - 1
        size = self._ticks(cost.keep_seconds, self.problem.sites[device].speed)
        again = self.model.new_constant(1) if self.sweeps else self.model.new_bool_var("")
        start, end, live = (self.model.new_int_var(0, self.limit, "") for _ in range(3))
        self.busy[device].append(self.model.new_optional_interval_var(start, size, end, again, ""))
        self.model.add(start >= self.turns[device])
        self.again[tile] = start
        self.model.add(end <= self.back[tile][0])
        self.model.add(live == end).only_enforce_if(again)
        self.model.add(live == self.forward[tile][1]).only_enforce_if(again.Not())
        self._hold(device, live, self.back[tile][0], 0 if last else least_internals(costs, tile[0]))
        if cost.reads_carry and has_carry(cost):
            self._hold(device, self.forward[tile][0], self.back[tile][1], cost.carry_bytes)
        if last and has_adjoint(cost):
            self._hold(device, self.turns[device], self.back[tile][1], cost.adjoint_bytes)

    def _hold(self, device: int, start: cp_model.IntVar, end: cp_model.IntVar, size: int) -> None:
        """`size` bytes are live on a device, up to what reads them last."""
        span = self.model.new_int_var(0, self.limit, "")
        self.held.setdefault(device, []).append((self.model.new_interval_var(start, span, end, ""), size))

    def _device(self, device: int, end: cp_model.IntVar) -> None:
        """One thing at a time, within the budget."""
        self.model.add_no_overlap(self.busy[device])
        own = [layer for layer, chunk in self.tiles if self.owner(layer, chunk) == device]
        resident, turn = self.problem.residency.on(min(own), max(own))
        self._hold(device, self.turns[device], end, sum(turn.values()))
        room = self.problem.sites[device].budget_bytes - sum(resident.values())
        spans, sizes = zip(*self.held[device], strict=True)
        self.model.add_cumulative(spans, sizes, room)
