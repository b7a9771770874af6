"""Time ranges joined by summaries: their plans verify, forget nothing, keep their budgets and their bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import layered_residency, random_joins, random_stack, regular_joins, regular_stack

from adjcomp.errors import BudgetError, VerifyError
from adjcomp.ir.actions import Action, Forward, Free
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan
from adjcomp.ir.summaries import RangeAction, SplitHalo, Summarize, Tail, TailVjp
from adjcomp.ir.transfers import Receive, Send
from adjcomp.ir.values import Kind
from adjcomp.machine import GIB, Machine, parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine
from adjcomp.passes.place.holding import Holding
from adjcomp.passes.place.joined import joined_actions
from adjcomp.passes.place.problem import Problem, Site
from adjcomp.passes.place.ranges import Ranges
from adjcomp.passes.place.search import relative_speeds, wiring_of
from adjcomp.passes.place.timeline import Timeline

EXAMPLES = settings().max_examples


def unequal(count: int, seed: int) -> Machine:
    """CPUs of different speeds, in two nodes."""
    machine, rng = parse_machine(f"cpu:{count}"), random.Random(seed)
    devices = [replace(d, peak_flops=d.peak_flops * rng.uniform(0.5, 2), node=i % 2) for i, d in enumerate(machine.devices)]
    return replace(machine, devices=tuple(devices), node_links={0: machine.node_links[0], 1: machine.node_links[0]})


def planned(costs: StackCosts, machine: Machine, budget: int, summaries: bool | None, placement: str | None = "time") -> Plan:
    """A plan of `costs`, verified, and its saved form read again."""
    plan = solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=machine,
        seq_len=costs.seq_len,
        budget_bytes=budget,
        candidates=[costs.chunk],
        options=Options(placement=placement, summaries=summaries),
    )
    plan.verify()
    assert Plan.from_json(plan.to_json()) == plan
    return plan


def small() -> Plan:
    """Four ranges of three chunks."""
    return planned(regular_joins(regular_stack(48, 4, 3)), parse_machine("cpu:4"), GIB, True)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 6), st.integers(3, 5))
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_every_stack_whose_ranges_join_gets_a_plan_that_verifies(seed: int, layers: int, chunks: int, count: int) -> None:
    costs = random_joins(random_stack(seed, layers=layers, chunks=count + chunks), seed)
    plan = planned(costs, unequal(count, seed), GIB, True)
    assert len({action.device for action in plan.actions if isinstance(action, Forward)}) == count


@given(st.integers(0, 10_000), st.integers(3, 4))
@settings(max_examples=max(1, EXAMPLES // 2), deadline=None)
def test_the_least_budget_plans_and_less_does_not(seed: int, count: int) -> None:
    costs, machine = random_joins(random_stack(seed, layers=3, chunks=6), seed), unequal(count, seed)
    with pytest.raises(BudgetError) as caught:
        planned(costs, machine, 1, True)
    least = caught.value.minimum_bytes
    for times in (1, 2):
        planned(costs, machine, times * least, True)
    with pytest.raises(BudgetError):
        planned(costs, machine, int(least * 0.9) - 1, True)


def test_many_ranges_are_joined_and_few_hand_their_states_on() -> None:
    costs = regular_joins(regular_stack(16384, 128, 12))
    for count, joined in ((3, False), (16, True)):
        both = {s: planned(costs, parse_machine(f"cpu:{count}"), 30_000_000, s).seconds for s in (True, False, None)}
        assert both[None] == min(both[True], both[False])
        assert (both[True] < both[False]) is joined


@pytest.mark.slow
def test_sixty_four_devices_are_three_quarters_as_good_as_two() -> None:
    costs = regular_joins(regular_stack(65536, 256, 22))
    two, many = (planned(costs, parse_machine(f"cpu:{n}"), 200_000_000, None).seconds for n in (2, 64))
    assert 2 * two / (64 * many) > 0.75


def test_only_states_their_adjoints_and_halos_travel_each_once_a_layer_and_border() -> None:
    plan = small()
    sent = [action.value for action in plan.actions if isinstance(action, Send)]
    assert {value.kind for value in sent} == {Kind.CARRY, Kind.ADJOINT, Kind.HALO, Kind.HALO_ADJOINT}
    assert len(set(sent)) == len(sent)
    assert sum(value.kind is Kind.CARRY for value in sent) == 3 * 3
    assert sum(value.kind is Kind.HALO for value in sent) == 3 * 2  # the last range gets its halos with its states


def test_the_first_range_and_the_last_one_summarize_nothing() -> None:
    assert {action.device for action in small().actions if isinstance(action, Summarize)} == {1, 2}


def test_what_cannot_be_joined_hands_on_and_a_wish_for_summaries_is_refused() -> None:
    costs, machine = regular_stack(4096, 256, 3), parse_machine("cpu:4")
    assert not any(isinstance(action, RangeAction) for action in planned(costs, machine, GIB, None).actions)
    with pytest.raises(ValueError, match="no summary speaks of"):
        planned(costs, machine, GIB, True)


def test_halos_longer_than_a_chunk_are_not_joined() -> None:
    costs = regular_joins(regular_stack(64, 2, 3))
    assert not any(isinstance(action, RangeAction) for action in planned(costs, parse_machine("cpu:4"), GIB, None).actions)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_forgets_an_action_on_its_ranges_does_not_verify(seed: int) -> None:
    plan = small() if seed == 0 else planned(_random(seed), unequal(4, seed), GIB, True)
    found: dict[str, int] = {}
    for index, action in enumerate(plan.actions):
        if isinstance(action, RangeAction):
            found.setdefault(f"{type(action).__name__} {action.frees != ()}", index)
    assert found
    for index in found.values():
        with pytest.raises(VerifyError):
            replace(plan, actions=(*plan.actions[:index], *plan.actions[index + 1 :])).verify()


def _random(seed: int) -> StackCosts:
    return random_joins(random_stack(seed, layers=3, chunks=9), seed)


def test_a_plan_without_the_gradients_of_a_halo_does_not_verify_even_when_it_frees_everything() -> None:
    """The halo's cotangent is dropped where it comes in: nothing is left over, but a gradient lacks a part."""
    plan = small()
    index = next(i for i, action in enumerate(plan.actions) if isinstance(action, TailVjp))
    dropped = plan.actions[index]
    instead = Free(device=dropped.device, frees=dropped.frees)
    with pytest.raises(VerifyError, match="pass back"):
        replace(plan, actions=(*plan.actions[:index], instead, *plan.actions[index + 1 :])).verify()


def test_a_summary_of_fewer_chunks_does_not_settle_a_range() -> None:
    plan = small()
    index = next(i for i, action in enumerate(plan.actions) if isinstance(action, Summarize) and action.chunk > action.first)
    action = plan.actions[index]
    assert isinstance(action, Summarize)
    shorter = replace(action, first=action.chunk)
    with pytest.raises(VerifyError, match=r"isn't live|no summary of chunks|never freed"):
        replace(plan, actions=(*plan.actions[:index], shorter, *plan.actions[index + 1 :])).verify()


def test_the_halos_cotangent_is_not_taken_from_an_adjoint_state_that_lacks_it() -> None:
    plan = small()
    index = next(i for i, action in enumerate(plan.actions) if isinstance(action, SplitHalo))
    moved = plan.actions[index]
    settle = next(
        i
        for i, action in enumerate(plan.actions)
        if type(action).__name__ == "AdjointSettle" and action.device == moved.device and action.layer == moved.layer  # type: ignore[attr-defined]
    )
    actions = list(plan.actions)
    del actions[index]
    actions.insert(settle + 1, replace(moved, frees=()))
    with pytest.raises(VerifyError, match="lacks its halos' part"):
        replace(plan, actions=tuple(actions)).verify()


def test_a_transfer_with_one_side_is_a_deadlock() -> None:
    plan = small()
    for kind in (Kind.HALO, Kind.HALO_ADJOINT):
        for side in (Send, Receive):
            index = next(i for i, a in enumerate(plan.actions) if isinstance(a, side) and a.value.kind is kind)
            with pytest.raises(VerifyError):
                replace(plan, actions=(*plan.actions[:index], *plan.actions[index + 1 :])).verify()


def test_the_tail_comes_before_all_else_of_a_layer() -> None:
    order = [type(a).__name__ for a in small().actions if a.device == 1 and getattr(a, "layer", None) == 1]
    assert order[: order.index("Forward")] == ["Tail", "Summarize", "Summarize", "Summarize", "Settle"]


def _all_plans(problem: Problem) -> Iterator[Ranges]:
    """Every way to cut the sequence into ranges of at least one chunk, that store little or hold everything."""
    count, chunks = len(problem.sites), problem.costs.chunk_count
    holding = Holding(problem, 64)
    levels = holding.depths
    pieces, held = {depth: holding.pieces(depth) for depth in levels}, {depth: holding.held(depth) for depth in levels}
    for inner in itertools.combinations(range(1, chunks), count - 1):
        cuts = (0, *inner, chunks)
        for stored in {levels[0], levels[-1]}:
            depths = tuple(((stored, b - a),) for a, b in pairwise(cuts))
            yield Ranges(cuts, depths, pieces, 0.0, 0.0, held, joined=True)


def _check_bound(seed: int) -> None:
    rng = random.Random(seed)
    costs = random_joins(random_stack(seed, layers=rng.randint(1, 3), chunks=rng.randint(3, 6)), seed)
    if any(join.steps > costs.chunk for join in costs.joins):
        return
    machine = unequal(rng.choice([3, 4]) if costs.chunk_count > 3 else 3, seed)
    sites = tuple(Site(d.name, GIB, GIB, s) for d, s in zip(machine.devices, relative_speeds(machine), strict=True))
    problem = Problem(costs, layered_residency(costs), sites, wiring_of(machine))
    least = min(_seconds(problem, plan) for plan in _all_plans(problem))
    plan = planned(costs, machine, GIB, True)
    assert plan.lower_bound_seconds <= least * (1 + 1e-9), seed


def _seconds(problem: Problem, plan: Ranges) -> float:
    lists: list[tuple[Action, ...]] = [joined_actions(problem, plan, device) for device in range(len(problem.sites))]
    return Timeline(problem.costs, problem.wiring, [site.speed for site in problem.sites], lists).run()[1]


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 400), marks=pytest.mark.slow)], ids=str)
def test_no_way_to_cut_the_sequence_passes_the_bound(seeds: range) -> None:
    for seed in seeds:
        _check_bound(seed)


def test_tails_are_made_of_the_last_chunk_of_each_range() -> None:
    plan = small()
    ends = {d: max(a.chunk for a in plan.actions if isinstance(a, Forward) and a.device == d) for d in range(3)}
    assert {(a.device, a.chunk) for a in plan.actions if isinstance(a, Tail)} == set(ends.items())
