"""Plans that keep borders in lower precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import VerifyError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.plan import Plan, Share
from adjcomp.options import Options
from adjcomp.passes.away import Rounded, emit_away
from adjcomp.passes.schedule import solve
from adjcomp.passes.schedule.instance import build_instance
from adjcomp.passes.schedule.search import build_plan

ROUNDED = Options(border_dtype="bfloat16")


def halved(costs: StackCosts, every: int = 1) -> StackCosts:
    """The costs with states that take half in bfloat16, of every so manyth layer."""

    def table(index: int) -> tuple:
        tiles = costs.layers if index == 0 else costs.last_layers
        return tuple(replace(t, narrow_bytes=t.carry_bytes // 2 if k % every == 0 else 0) for k, t in enumerate(tiles))

    return replace(costs, layers=table(0), last_layers=table(1))


def heavy(chunk: int) -> StackCosts:
    """A stack whose borders weigh more than its internals."""
    return halved(regular_stack(4096, chunk, 4, width=16, state=40_000))


def plan_with(budget: int, options: Options) -> Plan:
    """The plan of `heavy`."""
    return solve(heavy, seq_len=4096, budget_bytes=budget, candidates=[128, 256, 512], device="gpu", options=options)


def test_rounded_borders_make_room_where_borders_are_what_is_scarce() -> None:
    """Given leave to round, when borders take most of the budget, then they are rounded and the plan says so."""
    budget = 6_000_000
    exact, rounded = plan_with(budget, Options()), plan_with(budget, ROUNDED)
    rounded.verify()
    assert rounded.seconds < 0.9 * exact.seconds
    assert rounded.gap < 1e-3
    assert "AN APPROXIMATION" in str(rounded)
    assert "borders wait in bfloat16" in str(rounded)
    assert "APPROXIMATION" not in str(exact)
    assert "rounded" not in exact.certificate.space
    assert Plan.from_json(rounded.to_json()) == rounded
    assert any(isinstance(rounded.graph.nodes[i]["action"], Widen) for i in rounded.graph)


def test_nothing_is_rounded_where_everything_fits() -> None:
    roomy = plan_with(1 << 30, ROUNDED)
    assert not any(isinstance(a, Narrow) for a in roomy.actions)
    assert "APPROXIMATION" not in str(roomy)


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 4), chunks=st.integers(3, 9), every=st.integers(1, 2))
def test_what_rounded_columns_need_is_what_their_plan_takes(seed: int, layers: int, chunks: int, every: int) -> None:
    """Given any stack of which some layers round, then the plan replays and takes no more than the planner's arithmetic says."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    even = tuple(replace(t, carry_bytes=2 * t.carry_bytes) for t in costs.layers)
    costs = replace(costs, layers=even, last_layers=tuple(replace(t, carry_bytes=2 * t.carry_bytes) for t in costs.last_layers))
    costs = halved(costs, every)
    instance = build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes), rounded=True)
    kinds = instance.kinds()
    choice = [(seed + 5 * c) % len(instance.menus[kind]) for c, kind in enumerate(kinds)]
    plan = build_plan(costs, emit_away(Rounded(costs), instance.modes(choice)), 1 << 30, "gpu")
    plan.verify()
    left = [int(instance.menus[kind].left[j]) for kind, j in zip(kinds, choice, strict=True)]
    needs = [sum(left[:c]) + int(instance.menus[kind].need[j]) for c, (kind, j) in enumerate(zip(kinds, choice, strict=True))]
    assert plan.peak_bytes["gpu"] <= max(instance.fixed_bytes, *needs)


def test_a_rounded_plan_without_any_one_action_is_rejected() -> None:
    costs = halved(regular_stack(320, 64, 2, state=5000))
    modes = [ColumnMode(0), ColumnMode(0), ColumnMode(1), ColumnMode(2), ColumnMode(3)]
    plan = build_plan(costs, emit_away(Rounded(costs), modes), 1 << 30, "gpu")
    plan.verify()
    for index in range(len(plan.actions)):
        with pytest.raises(VerifyError):
            replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :]).verify()
    first = next(a for a in plan.actions if isinstance(a, Narrow))
    nowhere = tuple(replace(a, chunk=99) if a is first else a for a in plan.actions)
    with pytest.raises(VerifyError, match="no state of layer 1 after chunk 99"):
        replace(plan, actions=nowhere).verify()
    stem = tuple(replace(a, layer=0) if a is first else a for a in plan.actions)
    with pytest.raises(VerifyError, match="no narrower form"):
        replace(plan, actions=stem).verify()
