"""Nested plans: borders recomputed from fewer borders."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Advance, Forward
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan, Share
from adjcomp.passes.nesting import emit_nested
from adjcomp.passes.schedule.candidates import flat_minimum
from adjcomp.passes.schedule.instance import build_instance
from adjcomp.passes.schedule.needs import NEVER, least_stored, nested_minimum
from adjcomp.passes.schedule.nested import Nesting, least_advances
from adjcomp.passes.schedule.search import build_plan


def heavy(chunk: int, seq_len: int = 4096, layers: int = 4) -> StackCosts:
    """A stack whose borders weigh more than its internals."""
    return regular_stack(seq_len, chunk, layers, width=16, state=40_000)


@functools.cache
def revolve(chunks: int, free: int) -> int:
    """Advances of the best binomial schedule, by its recursion: the first border is stored, `free` others may be."""
    if chunks == 1:
        return 0
    if free == 0:
        return NEVER
    return min(j + revolve(chunks - j, free - 1) + revolve(j, free) for j in range(1, chunks))


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 12, 25])
@pytest.mark.parametrize("stored", [2, 3, 4, 7])
def test_the_least_number_of_advances_is_that_of_revolve(chunks: int, stored: int) -> None:
    assert least_advances(chunks, stored) == revolve(chunks, stored - 1) - (chunks - 1)


@pytest.mark.parametrize("chunks", [3, 5, 20, 256, 1024])
def test_the_fewest_stored_borders_cost_at_most_three_advances_a_chunk(chunks: int) -> None:
    stored = least_stored(chunks)
    assert least_advances(chunks, stored) <= 3 * chunks
    assert stored == 2 or math.comb(stored - 2 + 3, 3) < chunks


@pytest.mark.parametrize("spare", [0, 1, 3, 8])
def test_a_nested_plan_advances_no_more_than_revolve_with_as_many_borders(spare: int) -> None:
    """Given room for some borders and any option of the chunks, then the advances are the fewest that these borders allow."""
    costs = heavy(128)
    instance = build_instance(costs, Share("cpu", 0, costs.resident_bytes, costs.turn_bytes))
    border = sum(tile.carry_bytes for tile in costs.layers)
    budget = nested_minimum(instance) + spare * border
    nested = Nesting(instance, budget).solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs), budget, "cpu")
    plan.verify()
    advances = len({k for k, a in enumerate(plan.actions) if isinstance(a, Advance) and a.layer == 0})
    room = budget - (plan.certificate.peak_bytes["cpu"] - plan.bytes_by_kind["borders"])
    assert advances <= least_advances(costs.chunk_count, max(2, min(least_stored(costs.chunk_count) + spare, room // border)))


def test_below_the_least_budget_of_stored_borders_a_nested_plan_takes_over(
    plan_for: Callable[..., Plan], least_budget: Callable[..., int]
) -> None:
    lengths = [128, 256, 512]
    instances = [build_instance(c, Share("cpu", 0, c.resident_bytes, c.turn_bytes)) for c in map(heavy, lengths)]
    flat, least = min(map(flat_minimum, instances)), least_budget(heavy, lengths)
    assert least < flat
    for budget in (least, (least + flat) // 2, flat - 1):
        plan = plan_for(heavy, budget, lengths)
        plan.verify()
        assert any(isinstance(action, Advance) for action in plan.actions)
        assert plan.gap < 1e-6
        assert "nested" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
    assert plan_for(heavy, flat, lengths).seconds <= plan.seconds


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 4), chunks=st.integers(3, 9), spare=st.integers(0, 30))
def test_every_nested_plan_verifies_within_its_budget(seed: int, layers: int, chunks: int, spare: int) -> None:
    costs = random_stack(seed, layers=layers, chunks=chunks)
    instance = build_instance(costs, Share("cpu", 0, costs.resident_bytes, costs.turn_bytes))
    least = nested_minimum(instance)
    if least < NEVER:
        nested = Nesting(instance, least + spare).solve()
        assert nested is not None
        plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs), least + spare, "cpu")
        plan.verify()
        assert plan.seconds == pytest.approx(nested.ticks * instance.tick, rel=1e-9)
        assert Nesting(instance, least + spare).quick_bound() <= nested.ticks or not any(
            isinstance(a, Advance) for a in plan.actions
        )


def test_a_nested_plan_without_any_one_action_is_rejected() -> None:
    costs = heavy(64, seq_len=512, layers=2)
    instance = build_instance(costs, Share("cpu", 0, costs.resident_bytes, costs.turn_bytes))
    nested = Nesting(instance, nested_minimum(instance)).solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs), nested_minimum(instance), "cpu")
    assert any(isinstance(action, Advance) for action in plan.actions)
    for index in range(len(plan.actions)):
        with pytest.raises(VerifyError):
            replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :]).verify()


def test_an_advance_before_the_turn_is_refused() -> None:
    costs = heavy(64, seq_len=256, layers=2)
    instance = build_instance(costs, Share("cpu", 0, costs.resident_bytes, costs.turn_bytes))
    nested = Nesting(instance, nested_minimum(instance)).solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs), nested_minimum(instance), "cpu")
    swapped = tuple(
        Advance(a.layer, a.chunk, frees=a.frees) if isinstance(a, Forward) and a.chunk == 1 else a for a in plan.actions
    )
    with pytest.raises(VerifyError, match="Advance belongs after the turn"):
        replace(plan, actions=swapped).verify()
