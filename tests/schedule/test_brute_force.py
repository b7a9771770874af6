"""The planner against every plan there is, on tiny instances."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from synthetic import random_stack

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.plan import Share
from adjcomp.options import Options
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule import solve
from adjcomp.passes.simulate import simulate


def column_modes(costs: StackCosts) -> Iterator[ColumnMode]:
    """Every mode of a column."""
    bottom = bottom_layer(costs)
    for held in range(costs.head + 2 - bottom):
        below = range(bottom, costs.head - held)
        for size in range(len(below) + 1):
            for again in itertools.combinations(below, size):
                yield ColumnMode(held, frozenset(again))


def every_plan(costs: StackCosts) -> list[tuple[int, float]]:
    """(peak, seconds) of every plan of the space, by emitting and simulating it."""
    share = Share("cpu", 0, costs.resident_bytes, costs.turn_bytes)
    found = []
    for modes in itertools.product(list(column_modes(costs)), repeat=costs.chunk_count):
        totals = simulate(costs, (share,), emit(costs, modes))
        found.append((totals.peak_bytes["cpu"], totals.seconds))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_and_none_fits_a_budget_called_too_small(seed: int) -> None:
    """Given a tiny stack, when planned at every interesting budget, then the plan is the best one and the bound is below it."""
    layers, chunks = [(1, 3), (2, 2), (1, 2), (2, 1), (3, 1), (2, 2)][seed % 6]
    costs = random_stack(seed, layers=layers, chunks=chunks)
    plans = every_plan(costs)
    smallest = min(peak for peak, _ in plans)
    levels = sorted({peak for peak, _ in plans})
    with pytest.raises(BudgetError) as caught:
        solve(lambda _: costs, seq_len=costs.seq_len, budget_bytes=smallest - 1, candidates=[4], device="cpu", options=Options())
    assert caught.value.minimum_bytes == smallest
    assert sum(caught.value.contributors.values()) == smallest
    for budget in sorted({levels[0], levels[len(levels) // 3], levels[len(levels) // 2], levels[-1]}):
        best = min(seconds for peak, seconds in plans if peak <= budget)
        plan = solve(lambda _: costs, seq_len=costs.seq_len, budget_bytes=budget, candidates=[4], device="cpu", options=Options())
        plan.verify()
        assert plan.seconds == pytest.approx(best, rel=1e-9)
        assert plan.lower_bound_seconds <= best * (1 + 1e-12)
        assert plan.status == "optimal"
