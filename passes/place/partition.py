"""Contiguous layers to devices: the partition with the least bottleneck, and a bound that no partition goes below.

A stage's time grows with its layers, so for a target time it is best to give each device in turn as many layers as it can
finish by then. The least target for which all layers find a device is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from adjcomp.ir.costs import StackCosts
from adjcomp.passes.place.problem import Problem, internals, span, span_bytes
from adjcomp.passes.place.stage import Stage, busy_seconds, free_bytes, paced, stage

ROUNDS = 60  # bisections; each halves the interval
PRECISION = 1e-7  # relative width at which bisection ends

Fits = Callable[[int, int, int, float], bool]  # device, first layer, last layer, target seconds


@dataclass(frozen=True)
class Partition:
    """Stages, first layers first, and the seconds by which the slowest expects to be done."""

    stages: tuple[Stage, ...]
    seconds: float


def partition(problem: Problem) -> Partition | None:
    """The partition with the least time of the slowest stage; None where the layers don't fit on the devices."""
    devices = len(problem.sites)
    known: dict[tuple[int, int, int], tuple[Stage, float] | None] = {}

    def timed(device: int, first: int, last: int) -> tuple[Stage, float] | None:
        key = (device, first, last)
        if key not in known:
            made = stage(problem, device, first, last, devices - 1 - device)
            known[key] = None if made is None else (made, _shortest(problem, made) + _around(problem, first, last))
        return known[key]

    def fits(device: int, first: int, last: int, target: float) -> bool:
        found = timed(device, first, last) if problem.allows(device, first, last) else None
        return found is not None and found[1] <= target

    found = least_target(problem, fits)
    if found is None:
        return None
    target, cuts = found
    stages = []
    for device, (first, last) in enumerate(cuts):
        made = timed(device, first, last) if first <= last else None
        if made is not None:
            stages.append(made[0])
    return Partition(tuple(_settled(problem, stages, target)), target)


def partition_bound(problem: Problem) -> float:
    """Seconds that no plan with contiguous layers on the devices, in their order, goes below.

    Before a device starts, the first chunk passes the layers below it; after its last adjoint, the first chunk goes down those
    layers. Between its last forward and its first adjoint the last chunk goes up and comes back. Internals that are live when it
    does were kept or recomputed before; all others are recomputed later. That is at least what is left when the memory then holds
    those that save most: a fractional knapsack, by time saved for a byte. So with forwards F, adjoints A and this R of its layers

        T >= (first chunk below, there and back) + F + (last chunk above, there and back) + R + A.
    """
    fastest = max(site.speed for site in problem.sites)
    known: dict[tuple[int, int, int], float] = {}

    def least(device: int, first: int, last: int) -> float:
        key = (device, first, last)
        if key not in known:
            known[key] = _least(problem, device, first, last, fastest)
        return known[key]

    found = least_target(problem, lambda device, first, last, target: least(device, first, last) <= target)
    if found is None:
        raise RuntimeError("a target without limit refuses a partition")
    return found[0] * (1 - 2 * PRECISION)


def _shortest(problem: Problem, made: Stage) -> float:
    """Seconds of work of a stage that uses its room; the one with the head can hold single tiles of every chunk."""
    if made.last < problem.head:
        return busy_seconds(problem, made, made.most_hold)
    free = free_bytes(problem, made.device, made.first, made.last)
    free -= sum(internals(problem.costs, k) for k in range(made.first, made.last + 1))
    again = recomputed(problem, made.first, made.last, free, lambda k: internals(problem.costs, k))
    forward = span(problem.sums.forward_all, made.first, made.last)
    back = span(problem.sums.adjoint_all, made.first, made.last) + again
    return min(paced(problem, made.device, forward, back), busy_seconds(problem, made, made.most_hold))


def _around(problem: Problem, first: int, last: int) -> float:
    """Seconds that one chunk spends in the other layers, there and back, on devices of speed 1."""
    sums = problem.sums
    return sums.last_chunk[-1] - span(sums.last_chunk, first, last)


def _least(problem: Problem, device: int, first: int, last: int, fastest: float) -> float:
    """Seconds until a device with these layers is done that no plan goes below; the other devices are as fast as the fastest."""
    costs, site, sums = problem.costs, problem.sites[device], problem.sums
    borders = costs.chunk_count * span_bytes(sums.read_border_bytes, first, last)
    free = site.budget_bytes - problem.fixed_bytes(first, last) - borders
    free -= span_bytes(sums.adjoint_bytes, first, last)
    again = recomputed(problem, first, last, free, lambda k: least_internals(costs, k)) / site.speed
    below = span(sums.first_chunk, 0, first - 1) / fastest
    above = span(sums.last_chunk, last + 1, problem.head) / fastest
    return below + once(problem, first, last) / site.speed + above + again


def least_internals(costs: StackCosts, layer: int) -> int:
    """Bytes that internals of a tile take at least; an output that the tile above reads as its input counts there."""
    tile = costs.layers[layer]
    below = costs.layers[layer - 1].stream_bytes if layer > 0 and tile.reads_input else 0
    alone = tile.reads_output and layer < costs.head and not costs.layers[layer + 1].reads_input
    return tile.keep_bytes + below + (tile.stream_bytes if alone else 0)


def once(problem: Problem, first: int, last: int) -> float:
    """Seconds of all forwards and adjoints of some layers, at speed 1."""
    return span(problem.sums.forward_all, first, last) + span(problem.sums.adjoint_all, first, last)


def recomputed(problem: Problem, first: int, last: int, free: float, size: Callable[[int], int]) -> float:
    """Seconds of recomputation left when `free` bytes go where they save most: a fractional knapsack over inner chunks."""
    layers, chunks = problem.costs.layers, problem.costs.chunk_count - 1
    left = 0.0
    tiles = [(layers[k].keep_seconds, size(k)) for k in range(max(first, problem.bottom), last + 1)]
    for seconds, own in sorted(tiles, key=lambda pair: -pair[0] / max(pair[1], 1)):
        kept = min(1.0, max(free, 0) / (chunks * own)) if chunks * own > 0 else 1.0
        left += (1 - kept) * chunks * seconds
        free -= chunks * own
    return left


def least_target(problem: Problem, fits: Fits) -> tuple[float, list[tuple[int, int]]] | None:
    """The least target (to PRECISION) under which greedy extension places all layers, and its cuts; None when none does."""
    low, high = 0.0, _upper(problem)
    best = _extend(problem, fits, high)
    if best is None:
        return None
    for _ in range(ROUNDS):
        if high - low <= PRECISION * high:
            break
        middle = (low + high) / 2
        cuts = _extend(problem, fits, middle)
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return high, best


def _upper(problem: Problem) -> float:
    """Seconds that are enough for one device, the slowest, that runs every tile three times."""
    sums = problem.sums
    alone = 4 * (sums.forward_all[-1] + sums.adjoint_all[-1]) / min(site.speed for site in problem.sites)
    return alone + 2 * sum(problem.chain) + 1.0


def _extend(problem: Problem, fits: Fits, target: float) -> list[tuple[int, int]] | None:
    """First and last layer of each device (first > last where it has none); None when layers are left over."""
    cuts, first = [], 0
    for device in range(len(problem.sites)):
        last = first - 1
        while last < problem.head and fits(device, first, last + 1, target):
            last += 1
        cuts.append((first, last))
        first = last + 1
    return cuts if first > problem.head else None


def _settled(problem: Problem, stages: list[Stage], target: float) -> list[Stage]:
    """Stages that all hold as many chunks as the one with the least room, and more only where they need it to finish by `target`.

    Where one stage holds a chunk and another doesn't, the one gets ahead and waits. The lag is the number of stages that follow.
    """
    common = min(s.most_hold for s in stages)
    lags = _lags(stages)
    return [replace(s, lag=lag, hold=max(common, _least_hold(problem, s, target))) for s, lag in zip(stages, lags, strict=True)]


def _lags(stages: list[Stage]) -> list[int]:
    """How far the wave runs ahead in each stage: two chunks more than in the stage above, for both ways.

    Where there is less room it is one: a stage that isn't ahead of the one above would make it wait for every chunk.
    """
    rooms: list[int] = []
    for i, s in enumerate(stages):
        behind = len(stages) - 1 - i
        room = behind if s.again else max(behind, s.most_hold - 1)
        rooms.append(min(room, rooms[-1] - 1) if rooms else room)
    lags = [0]
    for room in reversed(rooms[:-1]):
        lags.append(min(lags[-1] + 2, room))
    return lags[::-1]


def _least_hold(problem: Problem, made: Stage, target: float) -> int:
    """The fewest held chunks with which the stage still finishes by `target`."""
    around = _around(problem, made.first, made.last)
    low, high = 0, made.most_hold
    while low < high:
        middle = (low + high) // 2
        if busy_seconds(problem, made, middle) + around <= target:
            high = middle
        else:
            low = middle + 1
    return low
