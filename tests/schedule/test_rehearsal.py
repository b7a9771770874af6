"""Pipelines by layers, timed piece by piece before they are written, and where their stages hold chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import layered_residency, random_stack, regular_stack, unequal_machine

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Share
from adjcomp.passes.place import lines
from adjcomp.passes.place.lines import lines_of
from adjcomp.passes.place.partition import Partition, partition
from adjcomp.passes.place.problem import Problem, Site
from adjcomp.passes.place.rehearsal import rehearsed
from adjcomp.passes.place.search import relative_speeds, wiring_of
from adjcomp.passes.place.timeline import Timeline
from adjcomp.passes.place.wave import Station, station_actions
from adjcomp.passes.simulate import simulate


def problem_of(costs: StackCosts, budgets: Sequence[int], seed: int = 1) -> Problem:
    """Layers on CPUs of different speeds with these bytes each."""
    machine = unequal_machine(len(budgets), seed)
    places = zip(machine.devices, budgets, relative_speeds(machine), strict=True)
    sites = tuple(Site(device.name, budget, budget, speed) for device, budget, speed in places)
    return Problem(costs, layered_residency(costs), sites, wiring_of(machine))


def written_seconds(problem: Problem, stations: list[Station]) -> float:
    """Seconds of the actions of a pipeline."""
    lists = [station_actions(problem.costs, problem.bottom, stations, i) for i in range(len(stations))]
    speeds = [problem.sites[station.device].speed for station in stations]
    return Timeline(problem.costs, problem.wiring, speeds, lists).run()[1]


def tight(devices: int = 4) -> tuple[Problem, Partition]:
    """Stages of 24 layers with room for some of 64 chunks, not for all; every other one has more than its neighbours."""
    costs = regular_stack(1 << 14, 256, 24)
    for budget in range(4 << 20, 128 << 20, 2 << 20):
        problem = problem_of(costs, [budget * (1 + 2 * (device % 2)) for device in range(devices)])
        solution = partition(problem)
        if solution is not None and min(stage.most_hold for stage in solution.stages) > 8:
            return problem, solution
    raise AssertionError("no budget holds some chunks")


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(2, 9), st.integers(2, 4), st.integers(0, 2000))
def test_a_rehearsal_takes_no_less_than_the_actions(seed: int, layers: int, chunks: int, devices: int, spare: int) -> None:
    """Given any stack and budget, when its pipeline is written and timed, then the rehearsal has promised no less, as far as
    nothing waits for a value to leave.
    """
    costs = random_stack(seed, layers=layers, chunks=chunks)
    problem = problem_of(costs, [300 + spare] * devices, seed)
    solution = partition(problem)
    if solution is None:
        return
    stations = lines_of(problem, solution)
    if len(stations) == len(problem.sites):
        assert rehearsed(problem, stations) >= 0.98 * written_seconds(problem, stations)


@pytest.mark.parametrize("devices", [3, 4])
def test_spread_chunks_are_faster_than_the_last_ones_and_fit(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given stages that hold different numbers of chunks, when these are spread, then nobody waits for the others' quick ones."""
    problem, solution = tight(devices)
    spread = lines_of(problem, solution)
    monkeypatch.setattr(lines, "STEPS", ())
    plain = lines_of(problem, solution)
    for stations in (spread, plain):
        assert rehearsed(problem, stations) == pytest.approx(written_seconds(problem, stations), rel=5e-3)
    assert written_seconds(problem, spread) < written_seconds(problem, plain)
    shares = []
    for station in spread:
        held = [mode.held > 0 for mode in station.modes]
        if station.above is not None and any(held):
            shares.append(sum(held[: len(held) // 2]) / sum(held))
    assert all(abs(share - 0.5) < 0.15 for share in shares)
    lists = [station_actions(problem.costs, problem.bottom, spread, i) for i in range(devices)]
    for station, actions in zip(spread, lists, strict=True):
        site = problem.sites[station.device]
        resident, turn = problem.residency.on(station.first, station.last)
        own = tuple(replace(action, device=0) for action in actions)
        peak = simulate(problem.costs, [Share(site.name, site.budget_bytes, resident, turn)], own).peak_bytes[site.name]
        assert peak <= site.budget_bytes


def test_chunks_are_spread_evenly_however_many_there_are() -> None:
    """Given any number of chunks, then the first n of the order are never far apart nor close, and all come once."""
    for count in (1, 2, 7, 64, 100):
        order = lines._evenly(count)
        assert sorted(order) == list(range(count))
        for first in range(2, count):
            places = sorted(order[:first])
            assert max(b - a for a, b in pairwise(places)) <= 4 * count / first + 1
