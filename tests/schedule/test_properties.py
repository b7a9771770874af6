"""What holds for every stack and budget."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import BudgetError
from adjcomp.ir.plan import Plan, Status

SEEDS = st.integers(0, 100_000)


@given(seed=SEEDS, layers=st.integers(1, 7), chunks=st.integers(1, 12), share=st.floats(0, 1))
def test_plans_verify_stay_in_budget_and_bound_their_time(
    plan_for: Callable[..., Plan], least_budget: Callable[..., int], seed: int, layers: int, chunks: int, share: float
) -> None:
    """Given any stack, when planned between its minimum and all it could use, then the plan proves itself."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    least = least_budget(lambda _: costs, [4])
    budget = least + round(share * 20 * layers * chunks)
    plan = plan_for(lambda _: costs, budget, [4])
    plan.verify()
    assert plan.peak_bytes["cpu"] <= budget
    assert 0 <= plan.lower_bound_seconds <= plan.seconds
    assert plan.gap <= 0.1
    assert sum(plan.bytes_by_kind.values()) == plan.peak_bytes["cpu"]


@given(
    seed=SEEDS, layers=st.integers(1, 6), chunks=st.integers(1, 10), steps=st.lists(st.integers(1, 60), min_size=2, max_size=4)
)
def test_a_larger_budget_is_never_refused_and_never_slower_beyond_the_gap(
    plan_for: Callable[..., Plan], least_budget: Callable[..., int], seed: int, layers: int, chunks: int, steps: list[int]
) -> None:
    costs = random_stack(seed, layers=layers, chunks=chunks)
    budget = least_budget(lambda _: costs, [4])
    before = plan_for(lambda _: costs, budget, [4])
    for step in steps:
        budget += step
        plan = plan_for(lambda _: costs, budget, [4])
        assert plan.seconds * (1 - plan.gap) <= before.seconds * (1 + 1e-9)
        before = plan


@given(seed=SEEDS, layers=st.integers(1, 6), chunks=st.integers(1, 9))
def test_the_minimum_plans_and_one_byte_less_does_not(
    plan_for: Callable[..., Plan], least_budget: Callable[..., int], seed: int, layers: int, chunks: int
) -> None:
    costs = random_stack(seed, layers=layers, chunks=chunks)
    least = least_budget(lambda _: costs, [4])
    for limit in (None, 0.0, 1e-6):
        plan = plan_for(lambda _: costs, least, [4], limit)
        plan.verify()
        assert plan.peak_bytes["cpu"] == least
        with pytest.raises(BudgetError) as caught:
            plan_for(lambda _: costs, least - 1, [4], limit)
        assert caught.value.minimum_bytes == least


@pytest.mark.parametrize("limit", [0.0, 1e-6, 0.05])
def test_without_time_to_search_the_plan_is_constructive_and_says_so(plan_for: Callable[..., Plan], limit: float) -> None:
    """Given a deadline that ends before any search, then there still is a plan, with a status that claims no proof."""
    plan = plan_for(lambda chunk: regular_stack(2048, chunk, 6), 7_500_000, [64, 128, 256], limit)
    plan.verify()
    assert plan.status is (Status.HEURISTIC if limit < 1e-3 else plan.status)
    assert plan.gap < 0.05
    best = plan_for(lambda chunk: regular_stack(2048, chunk, 6), 7_500_000, [64, 128, 256])
    assert best.seconds <= plan.seconds


PROGRAM = """
import sys
sys.path.insert(0, {support!r})
from synthetic import regular_stack
from adjcomp.options import Options
from adjcomp.passes.schedule import solve
plan = solve(lambda chunk: regular_stack(3000, chunk, 5), seq_len=3000, budget_bytes=6_300_000,
             candidates=[50, 64, 100, 128, 300], device="cpu", options=Options())
print(plan.chunk, plan.status.value)
sys.stdout.write(plan.to_json())
"""


def test_the_same_input_gives_the_same_bytes_in_every_process_and_hash_seed() -> None:
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", PROGRAM.format(support=support)]
    runs = [
        subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        for seed in ("0", "1", "77")
    ]
    assert len({hashlib.sha256(run.stdout).hexdigest() for run in runs}) == 1
    assert len(runs[0].stdout) > 10_000
