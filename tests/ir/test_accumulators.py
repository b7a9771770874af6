"""Gradients by layer: there from the first VJP that adds to them, smaller once they are published."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack, with_gradients

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Adjoint, HeadVjp, Publish, Turn
from adjcomp.ir.costs import Gradient, StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import Plan
from adjcomp.ir.replay import Replay
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule.search import build_plan

ROOMY = 1 << 40


def heavy(chunks: int) -> StackCosts:
    """Two layers between stem and head; the stem's gradient is the head's too; gradients outweigh all else."""
    costs = regular_stack(16 * chunks, 16, 2, width=4, state=8)
    gradients = (Gradient((0, 3), 4_000_000, 2_000_000), Gradient((1,), 600_000, 300_000), Gradient((2,), 800_000, 400_000))
    return replace(costs, gradients=gradients, turn_bytes={"gradients": 5_400_000})


def gradients_after(plan: Plan) -> list[int]:
    """Bytes of gradients after each action from the Turn on."""
    machine, found = Replay(plan), []
    for action in plan.actions:
        machine.step(action)
        if found or isinstance(action, Turn):
            found.append(machine.gradients[0].turn["gradients"])
    return found


def test_with_one_chunk_each_layer_is_published_right_after_its_vjp() -> None:
    """Given one chunk, when planned, then no two layers have accumulators at once but those that share a parameter."""
    costs = heavy(1)
    plan = build_plan(costs, emit(costs, [ColumnMode(4)]), ROOMY, "cpu")
    plan.verify()
    backward = [action for action in plan.actions if isinstance(action, Adjoint | HeadVjp | Publish)]
    assert [type(a) is Publish for a in backward] == [False, True] * 4
    sizes = gradients_after(plan)
    expected = [0, 4_000, 4_000, 4_800, 4_400, 5_000, 4_700, 4_700, 2_700]
    assert sizes == [1_000 * size for size in expected]
    assert plan.bytes_by_kind["gradients"] == 5_000_000


def test_with_several_chunks_they_come_with_the_first_backward_and_stay() -> None:
    costs = heavy(3)
    plan = build_plan(costs, emit(costs, [ColumnMode(0), ColumnMode(0), ColumnMode(4)]), ROOMY, "cpu")
    plan.verify()
    sizes = gradients_after(plan)
    assert sizes[0] == 0
    assert max(sizes) == 5_400_000
    assert sizes[-1] == 2_700_000
    assert sorted(sizes[:4]) == sizes[:4]


def test_a_publication_that_comes_late_is_noticed_by_its_bytes() -> None:
    """Given a plan for one chunk, when a publication moves to the end, then the peak isn't the promised one."""
    costs = heavy(1)
    plan = build_plan(costs, emit(costs, [ColumnMode(4)]), ROOMY, "cpu")
    late = next(i for i, a in enumerate(plan.actions) if isinstance(a, Publish) and a.layer == 2)
    actions = (*plan.actions[:late], *plan.actions[late + 1 :], plan.actions[late])
    with pytest.raises(VerifyError, match="promises a peak"):
        replace(plan, actions=actions).verify()


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(("factors", "match"), [((2, 1), "gradients take 5400000 bytes"), ((1, 4), "grow when they are")])
def test_gradients_that_say_something_else_are_noticed(index: int, factors: tuple[int, int], match: str) -> None:
    costs = heavy(1)
    plan = build_plan(costs, emit(costs, [ColumnMode(4)]), ROOMY, "cpu")
    old = costs.gradients[index]
    new = Gradient(old.layers, old.accumulator_bytes * factors[0], old.published_bytes * factors[1])
    gradients = (*costs.gradients[:index], new, *costs.gradients[index + 1 :])
    with pytest.raises(VerifyError, match=match):
        replace(plan, costs=replace(costs, gradients=gradients)).verify()


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 4), chunks=st.integers(1, 3))
def test_the_planner_and_the_verifier_count_alike(seed: int, layers: int, chunks: int) -> None:
    costs = with_gradients(random_stack(seed, layers=layers, chunks=chunks), seed)
    plan = build_plan(costs, emit(costs, [ColumnMode(0)] * chunks), ROOMY, "cpu")
    plan.verify()
    assert Plan.from_json(plan.to_json()) == plan
    assert max(plan.peak_bytes.values()) <= sum(
        build_plan(replace(costs, gradients=()), plan.actions, ROOMY, "cpu").peak_bytes.values()
    )
