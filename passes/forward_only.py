"""Plans of calls without gradients: every tile runs once and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from adjcomp.errors import BudgetError
from adjcomp.ir.actions import Action, Forward, Loss, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan
from adjcomp.passes.lifetimes import drop_after_last_use
from adjcomp.passes.schedule.search import build_plan


def forward_plan(costs: Callable[[int], StackCosts], candidates: Iterable[int], budget_bytes: int, device: str) -> Plan:
    """The plan with the longest chunk that fits: longer chunks mean fewer, larger kernels.

    Raises BudgetError where not even the shortest fits.
    """
    plan: Plan | None = None
    for chunk in sorted(candidates, reverse=True):
        table = replace(costs(chunk), turn_bytes={})
        plan = build_plan(table, drop_after_last_use(table, list(_actions(table))), budget_bytes, device)
        if plan.peak_bytes[device] <= budget_bytes:
            return plan
    if plan is None:
        raise ValueError("there is no chunk length to choose from")
    raise BudgetError(budget_bytes, plan.peak_bytes[device], plan.bytes_by_kind)


def _actions(costs: StackCosts) -> Iterator[Action]:
    yield Start(0, costs.head)
    for chunk in range(costs.chunk_count):
        yield from (Forward(layer, chunk, False) for layer in range(costs.head))
        yield Loss(chunk, False)
    yield Turn(0, costs.head)
