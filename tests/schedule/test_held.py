"""Ranges that hold internals from the forward where memory is left, and sums of gradients beside the VJPs of lower layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from synthetic import layered_residency, regular_joins, regular_stack

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, Adjoint, Forward, Publish, Recompute
from adjcomp.ir.plan import Plan
from adjcomp.ir.transfers import Sum
from adjcomp.machine import GIB, Link, parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine

COSTS = regular_joins(regular_stack(4096, 128, 8))


def planned(budget: int, *, summaries: bool = True, bandwidth: float | None = None) -> Plan:
    """Four ranges on CPUs, joined or not."""
    machine = parse_machine("cpu:4")
    if bandwidth is not None:
        machine = replace(machine, node_links=dict.fromkeys(machine.node_links, Link(bandwidth)))
    plan = solve_machine(
        [(lambda chunk: COSTS, layered_residency(COSTS))],
        machine=machine,
        seq_len=COSTS.seq_len,
        budget_bytes=budget,
        candidates=[COSTS.chunk],
        options=Options(placement="time", summaries=summaries),
    )
    plan.verify()
    return plan


def test_the_more_memory_the_more_layers_keep_in_the_forward() -> None:
    """Given more memory, then more forwards keep, the highest layers first, and what is kept isn't made again."""
    before: tuple[int, float] | None = None
    for budget in (12_000_000, 20_000_000, 40_000_000, GIB):
        plan = planned(budget)
        kept = {(a.layer, a.chunk) for a in plan.actions if isinstance(a, Forward) and a.keep}
        made = {(a.layer, a.chunk) for a in plan.actions if isinstance(a, Recompute) and a.keep}
        assert not kept & made
        for layer, chunk in kept:
            assert layer + 1 == COSTS.head or (layer + 1, chunk) in kept
        now = len(kept), plan.seconds
        assert before is None or (now[0] >= before[0] and now[1] <= before[1])
        before = now
    assert before is not None
    assert before[0] == COSTS.chunk_count * COSTS.head  # all of them, with all the memory there is
    assert not any(isinstance(a, Recompute) and a.layer < COSTS.head for a in plan.actions)


@pytest.mark.parametrize("summaries", [True, False])
def test_gradients_are_added_up_beside_the_vjps_of_lower_layers(summaries: bool) -> None:
    """Given slow links, then a step takes less than its work and all sums one after the other."""
    fast, slow = (planned(GIB, summaries=summaries, bandwidth=b) for b in (1e15, 8e7))
    assert slow.wiring is not None
    ranks = tuple(range(4))
    sums = [slow.wiring.sum_seconds(ranks, a.size) for a in slow.actions if isinstance(a, Sum) and a.device == 0]
    assert sum(sums) > 0.05 * fast.seconds
    assert slow.seconds < fast.seconds + 0.6 * sum(sums)
    assert slow.seconds > fast.seconds + 0.9 * min(sums)


def _moved(plan: Plan, what: Action, behind: Action) -> Plan:
    """The plan with one action right behind another one."""
    rest = [action for action in plan.actions if action is not what]
    place = next(i for i, action in enumerate(rest) if action is behind)
    return replace(plan, actions=(*rest[: place + 1], what, *rest[place + 1 :]))


def test_a_sum_that_comes_too_early_or_too_late_or_not_at_all_does_not_verify() -> None:
    plan = planned(GIB)
    own = [a for a in plan.actions if a.device == 1]
    done = next(a for a in own if isinstance(a, Sum) and a.layer == 2)
    last = [a for a in own if isinstance(a, Adjoint) and a.layer == 2][-1]
    earlier = own[own.index(last) - 1]
    out = next(a for a in own if isinstance(a, Publish) and a.layer == 2)
    without = replace(plan, actions=tuple(a for a in plan.actions if a is not done))
    for wrong in (_moved(plan, done, earlier), _moved(plan, done, out), without):
        with pytest.raises(VerifyError, match=r"added up|a sum waits"):
            wrong.verify()


def test_every_layer_is_added_up_once_on_every_device() -> None:
    found = Counter((a.layer, a.device) for a in planned(GIB).actions if isinstance(a, Sum))
    assert set(found.values()) == {1}
    assert len(found) == 4 * (COSTS.head + 1)
