"""From stages to stations: the modes of every chunk in every stage.

A stage that can't hold all chunks holds some from the forward on, which are quick in the backward. Where they are the last
ones, each stage has its quick chunks at another time than its neighbours and waits for those. So the held chunks may be
*spread*: evenly, and such that those of a stage with fewer are held in one with more. Which it is, and how far the wave runs
ahead, is tried out (`adjcomp.passes.place.rehearsal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.place.grid import Grid
from adjcomp.passes.place.partition import Partition
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.rehearsal import most_kept, rehearsed
from adjcomp.passes.place.stage import Stage, free_bytes, once_more
from adjcomp.passes.place.top import top_modes
from adjcomp.passes.place.wave import Station, reached

STEPS = (1, 2)  # chunks that the wave is ahead of the stage above, where held chunks are spread


def lines_of(problem: Problem, solution: Partition) -> list[Station]:
    """The stations of a partition, lowest layers first: the fastest of some ways to hold and to run ahead."""
    chunks = range(problem.costs.chunk_count)
    modes = _all_modes(problem, solution)
    plain = _stations(solution.stages, modes, chunks, [s.device for s in solution.stages])
    partial = (0 < stage.hold < len(chunks) for stage in solution.stages[:-1])
    if not any(partial):
        return plain
    tries = [plain, *(stations for step in STEPS if (stations := _spread(problem, solution, plain, step)) is not None)]
    return min(tries, key=lambda stations: rehearsed(problem, stations))


def _spread(problem: Problem, solution: Partition, plain: Sequence[Station], step: int) -> list[Station] | None:
    """The stations with held chunks spread over the sequence, as many as there is room for; the top one as it is.

    None where the wave can't run as far ahead.
    """
    order = _evenly(problem.costs.chunk_count)
    found: list[Station] = []
    for stage, station in zip(solution.stages[:-1], plain, strict=False):
        ahead = replace(station, lag=step * (len(plain) - 1 - len(found)))
        hold = _most_spread(problem, stage, [*found, ahead, *plain[len(found) + 1 :]], len(found), order)
        if hold is None:
            return None
        found.append(_holding(problem, stage, ahead, order[:hold]))
    return [*found, plain[-1]]


def _most_spread(problem: Problem, stage: Stage, line: Sequence[Station], place: int, order: Sequence[int]) -> int | None:
    """How many chunks of those that the stage at `place` wants to hold have room when they are spread; None where none do."""
    room = free_bytes(problem, stage.device, stage.first, stage.last) - once_more(problem, stage.again)

    def fits(hold: int) -> bool:
        made = _holding(problem, stage, line[place], order[:hold])
        waves = reached(problem.bottom, [*line[:place], made, *line[place + 1 :]])
        return most_kept(problem, made, waves[place]) <= room

    least, most = 0, stage.hold
    if not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _holding(problem: Problem, stage: Stage, station: Station, chunks: Sequence[int]) -> Station:
    """The station with some chunks held whole, the others recomputed by the wave."""
    held, whole, wave = set(chunks), _whole(problem, stage), ColumnMode(0, stage.again)
    return replace(station, modes=tuple(whole if chunk in held else wave for chunk in station.chunks))


def _evenly(count: int) -> list[int]:
    """All chunks, such that the first n are spread evenly for every n: van der Corput's sequence, from the last chunk on."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{place:0{bits}b}"[::-1], 2) for place in range(1 << bits))
    return [count - 1 - place for place in turned if place < count]


def lanes_of(problem: Problem, solution: Grid) -> list[list[Station]]:
    """The stations of every lane of a grid.

    The device of stage i and lane j is i * lanes + j. Lanes take the chunks in turn; one with a chunk less leaves out the first.
    """
    stages, lanes = solution.partition.stages, solution.lane.lanes
    modes, sums, found = _all_modes(solution.lane, solution.partition), [_sums(problem, stage) for stage in stages], []
    for index in range(lanes):
        chunks = range(index, problem.costs.chunk_count, lanes)
        own = [stage_modes[-len(chunks) :] for stage_modes in modes]
        stations = _stations(stages, own, chunks, [stage.device * lanes + index for stage in stages])
        beside = ((index - 1) % lanes - index, (index + 1) % lanes - index)
        if lanes > 1:
            stations = [
                replace(station, before=station.device + beside[0], after=station.device + beside[1], sums=own_sums)
                for station, own_sums in zip(stations, sums, strict=True)
            ]
        found.append(stations)
    return found


def _sums(problem: Problem, stage: Stage) -> tuple[tuple[int, int], ...]:
    """Layers of a stage that have gradients, highest first, and the bytes of those that its lanes add up."""
    own = range(stage.first, stage.last + 1)
    layers = range(stage.last, max(stage.first, problem.bottom) - 1, -1)
    return tuple((layer, problem.residency.gradients(layer, own)) for layer in layers)


def _stations(
    stages: Sequence[Stage], modes: Sequence[tuple[ColumnMode, ...]], chunks: range, devices: Sequence[int]
) -> list[Station]:
    """The stations of one lane, lowest layers first."""
    around = [None, *devices, None]
    return [
        Station(devices[i], stage.first, stage.last, stage.lag, chunks, modes[i], around[i], around[i + 2])
        for i, stage in enumerate(stages)
    ]


def _all_modes(problem: Problem, solution: Partition) -> list[tuple[ColumnMode, ...]]:
    """The modes of every chunk, by stage."""
    found = []
    for stage in solution.stages:
        modes = None
        if stage.last == problem.head:
            stored = max((other.hold for other in solution.stages[:-1]), default=0)
            modes = top_modes(problem, stage.device, stage.first, stored)
        found.append(modes or _modes(problem, stage))
    return found


def _modes(problem: Problem, stage: Stage) -> tuple[ColumnMode, ...]:
    """The last `hold` chunks are held whole, the others recomputed by the wave."""
    count = problem.costs.chunk_count
    return (ColumnMode(0, stage.again),) * (count - stage.hold) + (_whole(problem, stage),) * stage.hold


def _whole(problem: Problem, stage: Stage) -> ColumnMode:
    """Every tile with a VJP is held."""
    return ColumnMode(max(stage.last + 1 - max(stage.first, problem.bottom), 0))
