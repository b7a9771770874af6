"""A placement at one chunk length: its model, its bound, and the plan that it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adjcomp.ir.actions import Action
from adjcomp.ir.plan import Certificate, Plan, Share, Status
from adjcomp.ir.residency import all_on_each
from adjcomp.passes.place.balance import joined_ranges
from adjcomp.passes.place.grid import Grid, grid, grid_bound
from adjcomp.passes.place.joined import joined_actions
from adjcomp.passes.place.lines import lanes_of, lines_of
from adjcomp.passes.place.partition import Partition, partition, partition_bound
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.ranges import Ranges, ranges
from adjcomp.passes.place.sweep import sweep_actions
from adjcomp.passes.place.timeline import Timeline
from adjcomp.passes.place.wave import station_actions
from adjcomp.passes.simulate import simulate

SHRINKS = 6  # times that a plan over its budget is planned again with less
Solution = Partition | Ranges | Grid


@dataclass(frozen=True)
class Option:
    """A placement at one chunk length, before it is written out."""

    problem: Problem
    placement: str
    shape: tuple[int, int]  # stages and lanes of a grid
    solution: Solution
    seconds: float  # expected by the model


def modelled(problem: Problem, placement: str, shape: tuple[int, int]) -> Option | None:
    """The best solution of a placement's model; None where nothing fits."""
    solvers: dict[str, Callable[[], Solution | None]] = {
        "layers": lambda: partition(problem),
        "time": lambda: ranges(problem),
        "joined": lambda: joined_ranges(problem),
        "grid": lambda: grid(problem, shape),
    }
    solution = solvers[placement]()
    return None if solution is None else Option(problem, placement, shape, solution, solution.seconds)


def bound_of(problem: Problem, placement: str, shape: tuple[int, int], found: Sequence[Option]) -> float:
    """Seconds that no plan of a placement at a chunk length goes below."""
    if placement == "layers":
        return partition_bound(problem)
    own = [o.solution for o in found if o.problem is problem and (o.placement, o.shape) == (placement, shape)]
    if not own:
        return math.inf
    return own[0].bound_seconds * (1 - 1e-9) if isinstance(own[0], Ranges) else grid_bound(problem, shape)


def written(option: Option) -> Plan | None:
    """The plan of an option, within the budgets: where the model was too hopeful about bytes, with as much less; None where that
    doesn't fit.
    """
    problem, solution = option.problem, option.solution
    for _ in range(SHRINKS):
        plan = _plan(option.problem, solution)
        over = [plan.peak_bytes[share.name] - share.budget_bytes for share in plan.shares]
        if max(over) <= 0:
            return plan
        sites = tuple(replace(s, budget_bytes=s.budget_bytes - max(0, o)) for s, o in zip(problem.sites, over, strict=True))
        problem = replace(problem, sites=sites)
        again = modelled(problem, option.placement, option.shape)
        if again is None:
            break
        solution = again.solution
    return None


def _plan(problem: Problem, solution: Solution) -> Plan:
    """A solution as a plan without a bound."""
    owned: list[tuple[int, int] | None] = [None] * len(problem.sites)
    lists: list[tuple[Action, ...]] = [()] * len(problem.sites)
    if not isinstance(solution, Ranges):
        lanes = [lines_of(problem, solution)] if isinstance(solution, Partition) else lanes_of(problem, solution)
        for stations in lanes:
            for index, station in enumerate(stations):
                owned[station.device] = (station.first, station.last)
                lists[station.device] = station_actions(problem.costs, problem.bottom, stations, index)
    else:
        write = joined_actions if solution.joined else sweep_actions
        for device in range(len(problem.sites)):
            lists[device] = write(problem, solution, device)
            owned[device] = (0, problem.head) if lists[device] else None
    own = [() if layers is None else range(layers[0], layers[1] + 1) for layers in owned]
    everywhere = isinstance(solution, Ranges) or all_on_each(own, problem.head + 1)
    shares = []
    for site, layers in zip(problem.sites, owned, strict=True):
        if layers is not None:
            resident, turn = problem.residency.on(*layers)
        else:
            resident, turn = problem.residency.idle(replicated=everywhere), {}
        shares.append(Share(site.name, site.budget_bytes, resident, turn, site.speed))
    actions, seconds = Timeline(problem.costs, problem.wiring, [site.speed for site in problem.sites], lists).run()
    totals = simulate(problem.costs, shares, actions)
    certificate = Certificate(totals.peak_bytes, totals.bytes_by_kind, seconds, 0.0, Status.HEURISTIC, "", (problem.costs.chunk,))
    return Plan(problem.costs, tuple(shares), certificate, actions, problem.wiring)
