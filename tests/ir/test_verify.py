"""The verifier: what it accepts, and that it notices every single change that matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.plan import Plan
from adjcomp.ir.values import carry, stream
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule.search import build_plan

ROOMY = 1 << 40


def mixed_plan(seed: int = 3) -> Plan:
    """A plan with every mode in it."""
    costs = random_stack(seed, layers=3, chunks=4)
    most = costs.head + 1 - bottom_layer(costs)
    modes = [ColumnMode(0, frozenset({1})), ColumnMode(1), ColumnMode(2, frozenset({0})), ColumnMode(most)]
    return build_plan(costs, emit(costs, modes), ROOMY, "cpu")


def modes_of(costs_seed: int, choices: list[int], layers: int) -> Plan:
    """A plan of a random stack with modes drawn from `choices`."""
    costs = random_stack(costs_seed, layers=layers, chunks=len(choices))
    most, bottom = costs.head + 1 - bottom_layer(costs), bottom_layer(costs)
    modes = []
    for choice in choices:
        held = choice % (most + 1)
        below = range(bottom, costs.head - held)
        modes.append(ColumnMode(held, frozenset(k for k in below if choice >> (4 + k) & 1), held == 0 and choice % 2 == 1))
    return build_plan(costs, emit(costs, modes), ROOMY, "cpu")


@given(st.integers(0, 10_000), st.lists(st.integers(0, 4095), min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=2 * settings().max_examples)
def test_every_choice_of_modes_makes_a_plan_that_verifies_and_round_trips(seed: int, choices: list[int], layers: int) -> None:
    plan = modes_of(seed, choices, layers)
    plan.verify()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    again.verify()


@given(st.integers(0, 10_000), st.lists(st.integers(0, 4095), min_size=1, max_size=3), st.integers(1, 2))
@settings(max_examples=max(1, settings().max_examples // 2))
def test_a_plan_without_any_one_action_is_rejected(seed: int, choices: list[int], layers: int) -> None:
    plan = modes_of(seed, choices, layers)
    for index in range(len(plan.actions)):
        with pytest.raises(VerifyError):
            replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :]).verify()


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_with_any_action_twice_is_rejected(seed: int) -> None:
    plan = mixed_plan(seed)
    for index, action in enumerate(plan.actions):
        with pytest.raises(VerifyError):
            replace(plan, actions=(*plan.actions[:index], action, *plan.actions[index:])).verify()


@pytest.mark.parametrize("seed", range(4))
def test_two_neighbours_may_swap_only_where_neither_needs_the_other(seed: int) -> None:
    """Given a plan, when two neighbours swap, then the verifier accepts exactly those that are independent and keep the peak."""
    plan = mixed_plan(seed)
    accepted = 0
    for index in range(len(plan.actions) - 1):
        first, second = plan.actions[index : index + 2]
        swapped = replace(plan, actions=(*plan.actions[:index], second, first, *plan.actions[index + 2 :]))
        try:
            swapped.verify()
        except VerifyError:
            continue
        accepted += 1
        assert not isinstance(first, Start | Turn)
        assert not isinstance(second, Start | Turn)
        assert not set(first.writes(plan.costs)) & set(second.reads(plan.costs))
        assert not set(first.frees) & set(second.writes(plan.costs))
    assert accepted < len(plan.actions) / 2


def test_any_value_left_out_of_frees_or_freed_early_is_noticed() -> None:
    plan = mixed_plan()
    for index, action in enumerate(plan.actions):
        for value in action.frees:
            changed = replace(action, frees=tuple(v for v in action.frees if v != value))
            with pytest.raises(VerifyError):
                replace(plan, actions=(*plan.actions[:index], changed, *plan.actions[index + 1 :])).verify()


def test_keeping_the_wrong_way_is_noticed() -> None:
    plan = mixed_plan()
    for index, action in enumerate(plan.actions):
        if isinstance(action, Forward | Recompute | Loss):
            changed = replace(action, keep=not action.keep)
            with pytest.raises(VerifyError):
                replace(plan, actions=(*plan.actions[:index], changed, *plan.actions[index + 1 :])).verify()


def test_one_byte_less_of_budget_is_too_little_and_the_message_points_at_the_action() -> None:
    plan = mixed_plan()
    tight = replace(plan.shares[0], budget_bytes=plan.peak_bytes["cpu"])
    replace(plan, shares=(tight,)).verify()
    with pytest.raises(VerifyError, match="1 over its budget") as caught:
        replace(plan, shares=(replace(tight, budget_bytes=tight.budget_bytes - 1),)).verify()
    arrows = [line for line in str(caught.value).splitlines() if line.startswith("-->")]
    assert len(arrows) == 1
    assert len(str(caught.value).splitlines()) >= 5


@pytest.mark.parametrize("change", ["peak_bytes", "bytes_by_kind", "seconds", "lower_bound_seconds"])
def test_a_wrong_certificate_is_noticed(change: str) -> None:
    plan = mixed_plan()
    kinds = plan.bytes_by_kind
    wrong = {
        "peak_bytes": {"cpu": plan.peak_bytes["cpu"] + 1},
        "bytes_by_kind": {"cpu": {**kinds, "borders": kinds["borders"] + 1}},
        "seconds": plan.seconds + 1e-9,
        "lower_bound_seconds": plan.seconds + 1.0,
    }
    with pytest.raises(VerifyError):
        replace(plan, certificate=replace(plan.certificate, **{change: wrong[change]})).verify()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("position", "action", "reason"),
    [
        (0, Forward(0, 0, False), "has to start first"),
        (1, Forward(9, 0, False), "no tile"),
        (1, Forward(0, 99, False), "no tile"),
        (1, Adjoint(4, 0), "Loss and HeadVjp"),
        (1, Publish(2, device=3), "no device 3"),
        (1, Recompute(1, 0, False), "after the turn"),
        (1, HeadVjp(0), "after the turn"),
        (1, Start(0, 4), "starts twice"),
        (1, Publish(1), "no complete gradients"),
        (1, Forward(2, 0, False), r"reads x\[1,0\]"),
        (1, Forward(0, 0, False, frees=(stream(3, 3),)), r"frees x\[3,3\]"),
    ],
)
def test_a_foreign_action_is_named_by_the_rule_that_it_breaks(position: int, action: Action, reason: str) -> None:
    plan = mixed_plan(5)
    with pytest.raises(VerifyError, match=reason):
        replace(plan, actions=(*plan.actions[:position], action, *plan.actions[position:])).verify()


def test_the_rules_of_the_actions_agree_with_those_of_the_verifier() -> None:
    """Given a plan, when its actions say what they read and write, then a replay by their word alone ends with nothing live."""
    plan = mixed_plan()
    live = set()
    for action in plan.actions:
        assert set(action.reads(plan.costs)) <= live
        assert not set(action.writes(plan.costs)) & live
        live |= set(action.writes(plan.costs))
        assert set(action.frees) <= live
        live -= set(action.frees)
    assert not live


def test_a_plan_that_ends_early_says_what_is_missing() -> None:
    costs = regular_stack(64, 16, 2)
    plan = build_plan(costs, emit(costs, [ColumnMode(4)] * 4), ROOMY, "cpu")
    turn = next(i for i, action in enumerate(plan.actions) if isinstance(action, Turn))
    with pytest.raises(VerifyError, match=r"never turns(.|\n)*end of the plan"):
        replace(plan, actions=plan.actions[:turn]).verify()
    assert carry(1, -1) in plan.actions[0].writes(plan.costs)
