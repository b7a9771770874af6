"""Layers and time together: a grid of stages, each with some contiguous layers, and lanes, which take the chunks in turn.

Device (i, j) has the layers of stage i for the chunks j, j + R, j + 2 R, … of R lanes. A lane is a pipeline over its chunks like
the placement by layers; each layer's state goes from lane to lane, and its adjoint state back. Lanes work a layer apart: so the
chunks of a stage follow each other through one layer after the other, and no device waits while a stage has as many layers as
lanes. Contiguous ranges of time would not do: the block of layers and tokens after another in both directions starts when that
one is done to its last tile, so n x n blocks take as long as n of them in a row.

With C chunks, f and a the seconds of a tile's forward and VJP, s those that its state travels, and first and last chunk's seconds
in the layers below and above a layer, every plan of a grid in which R lanes share each stage has, for every layer k that hands
on a state,

    turned >= forwards below k + sum(f[k, c], c) + sum(s[k, c], c < C - 1) + forwards above k,
    T >= turned + VJPs above k + sum(a[k, c], c) + sum(s[k, c], c < C - 1) + VJPs below k:

each chunk waits for the one before it. The device with layers i … l makes the forwards F and VJPs A of its lane's chunks and the
recomputations R that its memory leaves to be done after its first VJP (as in `adjcomp.passes.place.partition`). Its first chunk
comes d chunks after the first of all, and in the lane of the last chunk its VJPs come after all of the lane's forwards:

    T >= forwards below i + d (f[i] + s[i]) + F + (a chunk above l, there and back) + R + A + d (a[i] + s[i]) + VJPs below i,
    T >= turned + VJPs above l + R + A + d (a[i] + s[i]) + VJPs below i.

A device with all layers makes its own chunks as one device makes a sequence, so F + R + A is at least the bound for that, too
(`adjcomp.passes.schedule.bound`), which knows that a chunk's internals have to fit at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from adjcomp.ir.plan import Share
from adjcomp.ir.values import has_adjoint, has_carry
from adjcomp.passes.place.partition import (
    PRECISION,
    Partition,
    least_internals,
    least_target,
    once,
    partition,
    recomputed,
)
from adjcomp.passes.place.problem import Problem, Site, span_bytes
from adjcomp.passes.schedule.bound import lower_bound
from adjcomp.passes.schedule.candidates import flat_minimum
from adjcomp.passes.schedule.instance import build_instance


@dataclass(frozen=True)
class Grid:
    """A placement on stages and lanes."""

    lane: Problem  # of the lane with most chunks
    partition: Partition  # of that lane; its devices are stages
    seconds: float  # expected


def shapes(devices: int) -> Iterator[tuple[int, int]]:
    """(stages, lanes) that make `devices` together, fewest lanes first."""
    return ((devices // lanes, lanes) for lanes in range(1, devices + 1) if devices % lanes == 0)


def grid(problem: Problem, shape: tuple[int, int]) -> Grid | None:
    """The best placement on (stages, lanes); None where it doesn't fit, or lanes would have no chunk."""
    stages, lanes = shape
    if lanes > problem.costs.chunk_count:
        return None
    sites = tuple(_weakest(problem.sites[i * lanes : (i + 1) * lanes]) for i in range(stages))
    costs = replace(problem.costs, chunk_count=-(-problem.costs.chunk_count // lanes), last_layers=problem.costs.layers)
    lane = replace(problem, costs=costs, sites=sites, lanes=lanes, chain=_chain(problem, shape))
    solution = partition(lane)
    if solution is None:
        return None
    apart = max(t.forward_seconds + t.adjoint_seconds for t in costs.layers) / min(site.speed for site in sites)
    return Grid(lane, solution, solution.seconds + (lanes - 1) * apart)


def _weakest(sites: tuple[Site, ...]) -> Site:
    """What all lanes of a stage can do."""
    return Site(
        sites[0].name, min(s.budget_bytes for s in sites), min(s.memory_bytes for s in sites), min(s.speed for s in sites)
    )


def _chain(problem: Problem, shape: tuple[int, int]) -> tuple[float, float]:
    """Expected seconds of all forwards, and of all VJPs, of the slowest layer that hands on a state."""
    if shape[1] == 1:
        return 0.0, 0.0
    lanes, tiles = _Lanes(problem, shape, max, min), problem.costs.layers
    forward = [lanes.chain(t.forward_seconds, t.forward_seconds, t.carry_bytes) for t in tiles if has_carry(t)]
    back = [lanes.chain(t.adjoint_seconds, t.adjoint_seconds, t.adjoint_bytes) for t in tiles if has_adjoint(t)]
    return max(forward, default=0.0), max(back, default=0.0)


class _Lanes:
    """How fast chunks follow each other through the lanes.

    `slower` chooses among the times of stages, `faster` among their speeds: max and min to be careful, the reverse for a bound.
    """

    def __init__(
        self, problem: Problem, shape: tuple[int, int], slower: Callable[..., float], faster: Callable[..., float]
    ) -> None:
        stages, lanes = shape
        self.wiring, self.slower, self.count = problem.wiring, slower, problem.costs.chunk_count
        self.speeds = [faster(problem.sites[i * lanes + j].speed for i in range(stages)) for j in range(lanes)]
        self.ways = [[(i * lanes + j, i * lanes + (j + 1) % lanes) for i in range(stages)] for j in range(lanes)]

    def way(self, lane: int, size: int) -> float:
        """Seconds that `size` bytes take from `lane` to the next one."""
        if len(self.ways) == 1:
            return 0.0
        return self.slower(self.wiring.seconds(a, b, size) for a, b in self.ways[lane])

    def chain(self, inner: float, last: float, size: int) -> float:
        """Seconds of one layer's tiles, `inner` and in the last chunk `last` at speed 1, that hand on `size` bytes."""
        lanes = len(self.speeds)
        steps = [len(range(j, self.count - 1, lanes)) for j in range(lanes)]
        whole = sum(n * (inner / speed + self.way(j, size)) for j, (n, speed) in enumerate(zip(steps, self.speeds, strict=True)))
        return whole + last / self.speeds[(self.count - 1) % lanes]


def grid_bound(problem: Problem, shape: tuple[int, int]) -> float:
    """Seconds that no plan on (stages, lanes) goes below: see the head of this file."""
    bound, *others = (_Bound(problem, shape, own) for own in _unlike_lanes(problem, shape))
    known: dict[tuple[tuple[Site, ...], int, int], float] = {}

    def fits(stage: int, first: int, last: int, target: float) -> bool:
        key = (tuple(replace(one.lane.sites[stage], name="") for one in (bound, *others)), first, last)
        if key not in known:
            known[key] = max(one.least(stage, first, last) for one in (bound, *others))
        return known[key] <= target

    found = least_target(bound.lane, fits)
    if found is None:
        raise RuntimeError("a target without limit refuses a partition")
    return max(found[0] * (1 - 2 * PRECISION), bound.through)


def _unlike_lanes(problem: Problem, shape: tuple[int, int]) -> list[int]:
    """The lane of the last chunk, and the others: of those with as many chunks on equal devices only the one that begins last."""
    stages, lanes = shape
    count = problem.costs.chunk_count
    ends = (count - 1) % lanes
    found: dict[tuple[int, tuple[tuple[int, float], ...]], int] = {}
    for own in range(lanes):
        sites = [problem.sites[i * lanes + own] for i in range(stages)]
        if own != ends:
            found[len(range(own, count, lanes)), tuple((site.budget_bytes, site.speed) for site in sites)] = own
    return [ends, *found.values()]


class _Bound:
    """Sums of the bound of one lane's devices; seconds. Devices other than the one at hand are as fast as the fastest."""

    def __init__(self, problem: Problem, shape: tuple[int, int], own: int) -> None:
        costs, count = problem.costs, problem.costs.chunk_count
        stages, lanes = shape
        self.own, self.ends = own, own == (count - 1) % lanes  # whether the last chunk is the lane's
        sites = tuple(problem.sites[i * lanes + own] for i in range(stages))
        chunks = replace(costs, chunk_count=len(range(own, count, lanes)))
        chunks = chunks if self.ends else replace(chunks, last_layers=costs.layers)
        self.lane = replace(problem, costs=chunks, sites=sites, lanes=lanes, chain=(0.0, 0.0))
        fastest = max(site.speed for site in problem.sites)
        pairs = list(zip(costs.layers, costs.last_layers, strict=True))
        self.forward = [min(a.forward_seconds, b.forward_seconds) / fastest for a, b in pairs]
        backs = [(a.adjoint_seconds, b.adjoint_seconds) if a.has_vjp else (0.0, 0.0) for a, b in pairs]
        self.back = [min(pair) / fastest for pair in backs]
        self.carries = [has_carry(a) for a, _ in pairs]
        self.lanes = _Lanes(problem, shape, min, max)
        self.turned, self.through = sum(self.forward), 0.0
        for k, (a, b) in enumerate(pairs):
            if self.carries[k]:
                chain = self.lanes.chain(a.forward_seconds, b.forward_seconds, a.carry_bytes)
                self.turned = max(self.turned, sum(self.forward) - self.forward[k] + chain)
        for k, (a, b) in enumerate(pairs):
            if has_adjoint(a):
                chain = self.lanes.chain(a.adjoint_seconds, b.adjoint_seconds, a.adjoint_bytes)
                self.through = max(self.through, self.turned + sum(self.back) - self.back[k] + chain)
        self.lane = replace(self.lane, chain=(self.turned, self.through))

    def _apart(self, seconds: float, size: int) -> float:
        """Seconds by which the first chunk of the last chunk's lane follows the first of all; a tile takes `seconds`."""
        return self.own * seconds + sum(self.lanes.way(j, size) for j in range(self.own))

    def least(self, stage: int, first: int, last: int) -> float:
        """Seconds until the device of the last chunk's lane with these layers is done."""
        lane, costs = self.lane, self.lane.costs
        site = lane.sites[stage]
        borders = costs.chunk_count * span_bytes(lane.sums.read_border_bytes, first, last)
        free = site.budget_bytes - lane.fixed_bytes(first, last) - borders
        free -= span_bytes(lane.sums.adjoint_bytes, first, last)
        again = recomputed(lane, first, last, free, lambda k: least_internals(costs, k)) / site.speed
        forwards = (lane.sums.forward_all[last + 1] - lane.sums.forward_all[first]) / site.speed
        back = once(lane, first, last) / site.speed - forwards + again + sum(self.back[:first])
        ready, above = sum(self.forward[:first]), sum(self.back[last + 1 :])
        if self.carries[first]:  # chunks of other lanes go before this lane's first one
            ready += self._apart(self.forward[first], costs.layers[first].carry_bytes)
            back += self._apart(self.back[first], costs.layers[first].adjoint_bytes) if costs.layers[first].has_vjp else 0.0
        found = max(ready + forwards + sum(self.forward[last + 1 :]), self.turned if self.ends else 0.0) + above + back
        if (first, last) != (0, costs.head):
            return found
        return max(found, ready + self._alone(site) + back - (again + once(lane, first, last) / site.speed - forwards))

    def _alone(self, site: Site) -> float:
        """Seconds of all that a device does which has all layers; infinite where they don't fit."""
        share = Share(site.name, site.budget_bytes, *self.lane.residency.on(0, self.lane.costs.head))
        instance = build_instance(self.lane.costs, share, noting=False)
        if flat_minimum(instance) > site.budget_bytes:
            return math.inf
        return lower_bound(instance, site.budget_bytes).ticks * instance.tick * (1 - PRECISION) / site.speed
