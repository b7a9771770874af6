"""A short way to plan a table of costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan
from adjcomp.options import Options
from adjcomp.passes.schedule import solve

Costs = Callable[[int], StackCosts]


@pytest.fixture
def plan_for() -> Callable[..., Plan]:
    """`plan_for(costs, budget, candidates, limit=None)`: the plan of a cost function."""

    def plan(costs: Costs, budget: int, candidates: Sequence[int], limit: float | None = None) -> Plan:
        options = Options(solver_time_limit_seconds=limit)
        seq_len = costs(candidates[0]).seq_len
        return solve(costs, seq_len=seq_len, budget_bytes=budget, candidates=candidates, device="cpu", options=options)

    return plan


@pytest.fixture
def least_budget(plan_for: Callable[..., Plan]) -> Callable[..., int]:
    """`least_budget(costs, candidates)`: the minimum that the planner names."""

    def least(costs: Costs, candidates: Sequence[int]) -> int:
        with pytest.raises(BudgetError) as caught:
            plan_for(costs, 1, candidates)
        assert caught.value.requested_bytes == 1
        return caught.value.minimum_bytes

    return least
