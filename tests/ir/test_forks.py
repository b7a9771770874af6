"""Streams side by side: what the verifier accepts between a Fork and its Join, and that it counts the worst order's memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, Adjoint, Publish
from adjcomp.ir.costs import StackCosts, Tie
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.plan import Plan
from adjcomp.ir.values import Value, cotangent, keep, value_bytes
from adjcomp.passes.emit import emit
from adjcomp.passes.forks import side_by_side
from adjcomp.passes.schedule.search import build_plan

ROOMY = 1 << 40


def serial_plan(seed: int, layers: int, chunks: int, budget: int = ROOMY, ties: tuple[Tie, ...] = ()) -> Plan:
    """A plan of a random stack whose VJPs all read the head's cotangent, with random modes."""
    costs = replace(random_stack(seed, layers=layers, chunks=chunks), shares_cotangent=True, coupling="residual", ties=ties)
    rng, most = random.Random(seed), costs.head + 1 - bottom_layer(costs)
    modes = [ColumnMode(rng.randint(0, most)) for _ in range(chunks)]
    return build_plan(costs, emit(costs, modes), budget, "cpu")


def stretches(plan: Plan) -> list[tuple[set[Value], list[Action]]]:
    """What is live at each Fork, and the actions up to its Join."""
    live: set[Value] = set()
    found: list[tuple[set[Value], list[Action]]] = []
    inside = False
    for action in plan.actions:
        if isinstance(action, Fork | Join):
            inside = isinstance(action, Fork)
            found += [(set(live), [])] if inside else []
        elif inside:
            found[-1][1].append(action)
        live |= set(action.writes(plan.costs))
        live -= set(action.frees)
    return found


def bytes_needed(costs: StackCosts, before: set[Value], order: Sequence[tuple[Action, bool]]) -> int:
    """The peak over what is live at the Fork; `order` has each action twice, where it begins (False) and where it ends (True)."""
    made, running, peak = 0, {}, 0
    for action, ends in order:
        assert isinstance(action, Adjoint)
        if ends:
            gone = [value for value in action.frees if value not in before]
            made += sum(value_bytes(costs, v) for v in action.writes(costs)) - sum(value_bytes(costs, v) for v in gone)
            del running[action.stream]
        else:
            workspace = costs.tile(action.layer, action.chunk).adjoint_workspace_bytes
            running[action.stream] = workspace + value_bytes(costs, keep(action.layer, action.chunk))
        peak = max(peak, made + sum(running.values()))
    return peak


def interleaved(actions: Sequence[Action], rng: random.Random) -> list[tuple[Action, bool]]:
    """Beginnings and ends of actions in some order in which the streams may run."""
    streams = sorted({a.stream for a in actions})
    lanes = [[(a, ends) for a in actions if a.stream == stream for ends in (False, True)] for stream in streams]
    found = []
    while any(lanes):
        found.append(rng.choice([lane for lane in lanes if lane]).pop(0))
    return found


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(2, 6))
def test_every_plan_on_several_streams_verifies_and_round_trips(seed: int, layers: int, chunks: int, streams: int) -> None:
    serial = serial_plan(seed, layers, chunks)
    plan = side_by_side(serial, streams)
    plan.verify()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.seconds == serial.seconds
    assert {a.stream for a in plan.actions} <= set(range(streams))
    same = [replace(a, stream=0, frees=()) for a in plan.actions if not isinstance(a, Fork | Join)]
    assert same == [replace(a, frees=()) for a in serial.actions]


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 3), st.integers(2, 4))
def test_no_order_of_the_streams_needs_more_than_the_peak(seed: int, layers: int, chunks: int, streams: int) -> None:
    """Given a plan on several streams, then its peak covers every order in which they could run, one after the other or mixed."""
    plan = side_by_side(serial_plan(seed, layers, chunks), streams)
    rng, fixed = random.Random(seed), sum(plan.costs.resident_bytes.values()) + sum(plan.costs.turn_bytes.values())
    for before, actions in stretches(plan):
        below = fixed + sum(value_bytes(plan.costs, value) for value in before)
        for _ in range(5):
            assert below + bytes_needed(plan.costs, before, interleaved(actions, rng)) <= plan.peak_bytes["cpu"]


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(0, 60))
def test_a_budget_is_kept_by_fewer_streams(seed: int, layers: int, room: int) -> None:
    """Given a budget a little over the plan's own peak, then streams are used only as far as they fit."""
    serial = serial_plan(seed, layers, 3)
    budget = serial.peak_bytes["cpu"] + room
    share = replace(serial.shares[0], budget_bytes=budget)
    plan = side_by_side(replace(serial, shares=(share,)), 4)
    plan.verify()
    assert plan.peak_bytes["cpu"] <= budget


def with_actions(plan: Plan, actions: Sequence[Action]) -> Plan:
    return replace(plan, actions=tuple(actions))


def forked_plan(ties: tuple[Tie, ...] = ()) -> Plan:
    """Three layers on two streams, everything held."""
    stacks = (random_stack(seed, layers=3, chunks=2) for seed in range(100))
    costs = replace(
        next(stack for stack in stacks if bottom_layer(stack) == 0), shares_cotangent=True, coupling="residual", ties=ties
    )
    plan = build_plan(costs, emit(costs, [ColumnMode(costs.head + 1 - bottom_layer(costs))] * 2), ROOMY, "cpu")
    return side_by_side(plan, 2)


def test_a_race_is_noticed() -> None:
    """Given a plan on two streams, when one of them drops what both read, then the verifier notices."""
    plan = forked_plan()
    chunk = plan.costs.chunk_count - 1
    shared = cotangent(plan.costs.head - 1, chunk)
    first = next(i for i, a in enumerate(plan.actions) if isinstance(a, Join))
    last = first - 1
    actions = list(plan.actions)
    actions[last] = replace(actions[last], frees=(*actions[last].frees, shared))
    actions[first] = Join(frees=tuple(v for v in actions[first].frees if v != shared))
    with pytest.raises(VerifyError, match="another stream may still read"):
        with_actions(plan, actions).verify()


def test_two_streams_never_add_to_one_gradient() -> None:
    """Given tied layers, then the planner keeps them on one stream, and the verifier refuses them on two."""
    tie = Tie((1, 3), 8)
    plan = forked_plan((tie,))
    plan.verify()
    stream_of = {a.layer: a.stream for a in plan.actions if isinstance(a, Adjoint) and a.chunk == 0}
    assert stream_of[1] == stream_of[3]
    apart = forked_plan()
    both = {a.layer: a.stream for a in apart.actions if isinstance(a, Adjoint) and a.chunk == 0}
    two = next(pair for pair in ((1, 2), (2, 3), (1, 3)) if both[pair[0]] != both[pair[1]])
    with pytest.raises(VerifyError, match="both add to the gradients of layer"):
        replace(apart, costs=replace(apart.costs, ties=(Tie(two, 8),))).verify()
    with pytest.raises(VerifyError, match="both add to the gradients of layer"):
        replace(apart, costs=replace(apart.costs, shared_sides=(two,))).verify()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda actions: [a for a in actions if not isinstance(a, Fork)], "outside of a Fork"),
        (lambda actions: [a for a in actions if not isinstance(a, Join)], "can't run beside other streams"),
        (lambda actions: [actions[0], Join(), *actions[1:]], "a Join without a Fork"),
        (lambda actions: [actions[0], Fork(), *actions[1:]], "Forward can't run beside"),
        (lambda actions: [*actions, Fork()], "a Fork has no Join"),
    ],
)
def test_a_broken_stretch_is_named(change: object, reason: str) -> None:
    plan = forked_plan()
    assert callable(change)
    with pytest.raises(VerifyError, match=reason):
        with_actions(plan, change(list(plan.actions))).verify()


def test_one_byte_less_than_the_streams_need_is_too_little() -> None:
    plan = forked_plan()
    tight = replace(plan.shares[0], budget_bytes=plan.peak_bytes["cpu"])
    replace(plan, shares=(tight,)).verify()
    with pytest.raises(VerifyError, match="1 over its budget"):
        replace(plan, shares=(replace(tight, budget_bytes=tight.budget_bytes - 1),)).verify()
    assert any(isinstance(a, Publish) for a in plan.actions)
