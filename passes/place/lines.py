"""From stages to stations: the modes of every chunk in every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.place.grid import Grid
from adjcomp.passes.place.partition import Partition
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.stage import Stage
from adjcomp.passes.place.top import top_modes
from adjcomp.passes.place.wave import Station


def lines_of(problem: Problem, solution: Partition) -> list[Station]:
    """The stations of a partition, lowest layers first."""
    chunks = range(problem.costs.chunk_count)
    return _stations(solution.stages, _all_modes(problem, solution), chunks, [s.device for s in solution.stages])


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
    count, size = problem.costs.chunk_count, stage.last + 1 - max(stage.first, problem.bottom)
    wave, whole = ColumnMode(0, stage.again), ColumnMode(max(size, 0))
    return (wave,) * (count - stage.hold) + (whole,) * stage.hold
