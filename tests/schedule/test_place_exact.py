"""Bounds and plans of placements beside the fastest schedules of tiny instances, over all partitions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fastest import fastest, fastest_sweeps
from synthetic import layered_residency, random_stack

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan
from adjcomp.machine import GIB, Machine, parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine
from adjcomp.passes.place.grid import grid_bound
from adjcomp.passes.place.problem import Problem, Site
from adjcomp.passes.place.search import relative_speeds, wiring_of

SHAPES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]
FEW = range(24)
MANY = [pytest.param(range(first, first + 50), marks=pytest.mark.slow) for first in range(24, 324, 50)]
TIMES = [1.0, 1.5, 1000.0]  # the least budget


def unequal(count: int, seed: int) -> Machine:
    """CPUs of different speeds."""
    machine, rng = parse_machine(f"cpu:{count}"), random.Random(seed)
    return replace(machine, devices=tuple(replace(d, peak_flops=d.peak_flops * rng.uniform(0.5, 2)) for d in machine.devices))


def problem_of(costs: StackCosts, machine: Machine, budget: int) -> Problem:
    """The placement problem at the chunk length of `costs`."""
    pairs = zip(machine.devices, relative_speeds(machine), strict=True)
    sites = tuple(Site(device.name, budget, GIB, speed) for device, speed in pairs)
    return Problem(costs, layered_residency(costs), sites, wiring_of(machine))


def planned(costs: StackCosts, machine: Machine, budget: int, placement: str, shape: tuple[int, int]) -> Plan:
    """The plan at that chunk length."""
    return solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=machine,
        seq_len=costs.seq_len,
        budget_bytes=budget,
        candidates=[costs.chunk],
        options=Options(placement=placement),
        shape=shape,
    )


def check(seed: int) -> None:
    """bound <= fastest <= plan, of one instance.

    Where a device has all layers, the bound knows of residual chunks and workspaces, which the fastest schedule leaves out: then,
    unless memory is ample, the bound is compared with the plan alone.
    """
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    placement = "grid" if shape[1] > 1 else "layers"
    costs = random_stack(seed, layers=rng.randint(1, 3), chunks=rng.randint(shape[1], 4))
    machine = unequal(shape[0] * shape[1], seed)
    with pytest.raises(BudgetError) as caught:
        planned(costs, machine, 1, placement, shape)
    budget = round(caught.value.minimum_bytes * TIMES[seed % len(TIMES)])
    plan = planned(costs, machine, budget, placement, shape)
    least, reached = fastest(problem_of(costs, machine, budget), shape)
    if shape[0] > 1 or seed % len(TIMES) == len(TIMES) - 1:
        assert plan.lower_bound_seconds <= reached * (1 + 1e-4), (seed, shape)
    else:
        assert grid_bound(problem_of(costs, machine, budget), shape) <= plan.seconds, (seed, shape)
    assert least <= plan.seconds, (seed, shape)


def check_sweeps(seed: int) -> None:
    """The same by time, where memory is no matter."""
    rng = random.Random(seed)
    costs, machine = random_stack(seed, layers=rng.randint(1, 3), chunks=rng.randint(1, 4)), unequal(2, seed)
    plan = planned(costs, machine, GIB, "time", (1, 2))
    least, reached = fastest_sweeps(problem_of(costs, machine, GIB))
    assert plan.lower_bound_seconds <= reached * (1 + 1e-4), seed
    assert least <= plan.seconds, seed


@pytest.mark.parametrize("seeds", [FEW, *MANY], ids=str)
def test_no_schedule_passes_the_bound_of_layers_or_grid_and_no_plan_the_fastest_schedule(seeds: range) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.parametrize("seeds", [FEW[:12], *MANY], ids=str)
def test_no_schedule_passes_the_bound_of_ranges_and_no_plan_the_fastest_schedule(seeds: range) -> None:
    for seed in seeds:
        check_sweeps(seed)
