"""One stage of a pipeline over layers: what a device with some contiguous layers holds, and how long it works.

A stage keeps the internals of its last `hold` chunks from the forward on. For the others a wave of recomputation runs through
all stages, each handing x on to the next, and the adjoints come back. Stages far from the head recompute a chunk long before
its adjoint arrives: with `lag` stages behind it, a stage has the internals of up to lag + 1 chunks at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from adjcomp.passes.place.problem import Problem, internals, span, span_bytes

WORK = 1e-3  # what a second of work counts that nobody waits for


@dataclass(frozen=True)
class Stage:
    """Layers `first` … `last` on a device, with the modes of their tiles."""

    device: int
    first: int
    last: int
    lag: int  # how many chunks the wave runs ahead of the adjoints
    hold: int  # chunks at the end whose internals stay from the forward on
    most_hold: int  # chunks for which there is room
    again: frozenset[int]  # tiles that keep only their input in the wave and run once more before their adjoint


def stage(problem: Problem, device: int, first: int, last: int, lag: int) -> Stage | None:
    """The stage that holds as much as it can; None where the layers don't fit on the device."""
    free = free_bytes(problem, device, first, last)
    count = problem.costs.chunk_count
    flying = min(lag + 1, count)
    again: set[int] = set()
    for candidate in (None, *_by_worth(problem, first, last, lag)):
        if candidate is not None:
            again.add(candidate)
        live, room = _live(problem, first, last, again), free - once_more(problem, again)
        if flying * live <= room:
            most = min(count, _most_held(room, span_bytes(problem.sums.internals, first, last), live, flying))
            return Stage(device, first, last, lag, most, most, frozenset(again))
    return None


def _most_held(room: int, whole: int, live: int, flying: int) -> int:
    """The most chunks h with h held ones of `whole` bytes, and those of `live` bytes that make up `flying`, in `room`."""
    if whole == 0:
        return flying
    if flying * whole <= room:
        return room // whole
    return (room - flying * live) // (whole - live) if whole > live else 0


def free_bytes(problem: Problem, device: int, first: int, last: int) -> int:
    """Bytes that a device with these layers has for internals."""
    costs, sums = problem.costs, problem.sums
    borders = costs.chunk_count * span_bytes(sums.border_bytes, first, last) + span_bytes(sums.adjoint_bytes, first, last)
    tiles = costs.layers[first : last + 1]
    work = max(max(t.forward_workspace_bytes, t.keep_workspace_bytes, t.adjoint_workspace_bytes) for t in tiles)
    publish = max(costs.publish_bytes[first : last + 1])
    used = problem.fixed_bytes(first, last) + borders + max(work, publish) + buffer_bytes(problem, first, last)
    return problem.sites[device].budget_bytes - used


def buffer_bytes(problem: Problem, first: int, last: int) -> int:
    """Double buffers of what comes in and goes out, and the residual chunk and cotangent at work."""
    layers, sums = problem.costs.layers, problem.sums
    ends = [layers[k] for k in (first - 1, last) if 0 <= k < problem.head]
    largest = max(t.stream_bytes + t.cotangent_bytes for t in layers[max(first - 1, 0) : last + 1])
    states = span_bytes(sums.border_bytes, first, last) + span_bytes(sums.adjoint_bytes, first, last)
    between = 3 * states if problem.lanes > 1 else 0  # states on their way to another lane, besides those that stay
    return sum(3 * t.stream_bytes + 3 * t.cotangent_bytes for t in ends) + largest + between


def busy_seconds(problem: Problem, stage: Stage, hold: int) -> float:
    """Seconds of work of a stage that holds `hold` chunks, on its device."""
    sums, count = problem.sums, problem.costs.chunk_count
    first, last = stage.first, stage.last
    more = span(sums.keep, first, last) - span(sums.forward, first, last)
    again = sum(problem.costs.layers[k].forward_seconds for k in stage.again)
    forward = span(sums.forward_all, first, last) + hold * more
    back = span(sums.adjoint_all, first, last) + (count - hold) * (span(sums.keep, first, last) + again)
    return paced(problem, stage.device, forward, back)


def paced(problem: Problem, device: int, forward: float, back: float) -> float:
    """Seconds of a device's forward and backward, which take that long at speed 1; it can't be ahead of other lanes.

    Where it waits for those anyway, less work is still a little better: for the devices to share the memory.
    """
    forward, back = forward / problem.sites[device].speed, back / problem.sites[device].speed
    waits = max(0.0, problem.chain[0] - forward) + max(0.0, problem.chain[1] - back)
    return forward + back + (1 - WORK) * waits


def pass_seconds(problem: Problem, stage: Stage) -> float:
    """Seconds of the wave through one chunk of a stage, second runs included."""
    again = sum(problem.costs.layers[k].forward_seconds for k in stage.again)
    return (span(problem.sums.keep, stage.first, stage.last) + again) / problem.sites[stage.device].speed


def _by_worth(problem: Problem, first: int, last: int, lag: int) -> Iterator[int]:
    """Tiles to run a second time, the least time for a byte saved first.

    The top tile comes last. Its x is handed on by the wave, so the second run can't follow the first: the wave has to be ahead,
    by a chunk that every lane has (some have one less).
    """
    layers = problem.costs.layers
    tiles = [k for k in range(max(first, problem.bottom), last) if internals(problem.costs, k) > 0]
    yield from sorted(tiles, key=lambda k: (layers[k].forward_seconds / internals(problem.costs, k), k))
    shortest = problem.costs.chunk_count - (problem.lanes > 1)
    if lag > 0 and shortest > 1 and last >= problem.bottom:
        yield last


def _live(problem: Problem, first: int, last: int, again: set[int]) -> int:
    """Bytes that stay of a chunk between the wave and its adjoints."""
    layers = problem.costs.layers
    kept = sum(internals(problem.costs, k) for k in range(first, last + 1) if k not in again)
    return kept + sum(layers[k - 1].stream_bytes for k in again if k > 0)


def once_more(problem: Problem, again: Set[int]) -> int:
    """Bytes of the internals of one tile that runs a second time."""
    return max((internals(problem.costs, k) for k in again), default=0)
