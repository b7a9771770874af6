"""From stages to stations: the modes of every chunk in every stage."""

from __future__ import annotations

from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.place.partition import Partition
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.stage import Stage
from adjcomp.passes.place.top import top_modes
from adjcomp.passes.place.wave import Station


def lines_of(problem: Problem, solution: Partition) -> list[Station]:
    """The stations of a partition, lowest layers first."""
    stages = solution.stages
    stations = []
    for i, stage in enumerate(stages):
        modes = None
        if stage.last == problem.head:
            stored = max((other.hold for other in stages[:-1]), default=0)
            modes = top_modes(problem, stage.device, stage.first, stored)
        below = stages[i - 1].device if i else None
        above = stages[i + 1].device if i + 1 < len(stages) else None
        stations.append(Station(stage.device, stage.first, stage.last, stage.lag, modes or _modes(problem, stage), below, above))
    return stations


def _modes(problem: Problem, stage: Stage) -> tuple[ColumnMode, ...]:
    """The last `hold` chunks are held whole, the others recomputed by the wave."""
    count, size = problem.costs.chunk_count, stage.last + 1 - max(stage.first, problem.bottom)
    wave, whole = ColumnMode(0, stage.again), ColumnMode(max(size, 0))
    return (wave,) * (count - stage.hold) + (whole,) * stage.hold
