"""The printed plan and the saved plan, whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from synthetic import random_stack, regular_stack

from adjcomp.ir.costs import Gradient
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.verify import neighbourhood
from adjcomp.options import Options
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule import solve
from adjcomp.passes.schedule.search import build_plan

Golden = Callable[[str, str], None]


def test_a_plan_with_every_mode_prints_as_before(golden: Golden) -> None:
    plan = solve(
        lambda chunk: regular_stack(4096, chunk, 6),
        seq_len=4096,
        budget_bytes=8_400_000,
        candidates=[64, 128, 256, 512],
        device="cpu",
        options=Options(),
    )
    golden("tight_plan.txt", f"{plan}\n")


def test_a_plan_that_holds_everything_prints_as_before(golden: Golden) -> None:
    plan = solve(
        lambda chunk: regular_stack(1024, chunk, 2),
        seq_len=1024,
        budget_bytes=1 << 30,
        candidates=[1024],
        device="cuda:0",
        options=Options(),
    )
    golden("roomy_plan.txt", f"{plan}\n")


def test_a_saved_plan_reads_as_before(golden: Golden) -> None:
    costs = random_stack(1, layers=2, chunks=2)
    plan = build_plan(costs, emit(costs, [ColumnMode(0, frozenset({1})), ColumnMode(2)]), 1000, "cpu")
    plan.verify()
    golden("saved_plan.json", plan.to_json())


def test_a_neighbourhood_points_at_its_action(golden: Golden) -> None:
    costs = random_stack(1, layers=2, chunks=2)
    plan = build_plan(costs, emit(costs, [ColumnMode(0, frozenset({1})), ColumnMode(2)]), 1000, "cpu")
    golden("neighbourhood.txt", "\n\n".join(neighbourhood(plan, index) for index in (0, 9, len(plan.actions))) + "\n")


def test_a_nested_plan_prints_as_before(golden: Golden) -> None:
    plan = solve(
        lambda chunk: regular_stack(2048, chunk, 3, state=20_000),
        seq_len=2048,
        budget_bytes=5_300_000,
        candidates=[128],
        device="cpu",
        options=Options(),
    )
    golden("nested_plan.txt", f"{plan}\n")


def test_a_layer_major_plan_prints_as_before(golden: Golden) -> None:
    costs = regular_stack(1024, 128, 6)
    gradients = tuple(Gradient((k,), 8_000_000, 4_000_000) for k in range(1, 7))
    costs = replace(costs, gradients=gradients, turn_bytes={"gradients": 48_000_000})
    plan = solve(lambda _: costs, seq_len=1024, budget_bytes=33_500_000, candidates=[128], device="cuda:0", options=Options())
    golden("layer_major_plan.txt", f"{plan}\n")
