"""Nested plans whose stored borders are on the device and on the host."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import BudgetError, VerifyError
from adjcomp.ir.actions import Action, Advance
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import HostTier, Plan, Share
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.options import Options
from adjcomp.passes.nesting import Run, emit_nested
from adjcomp.passes.schedule import solve
from adjcomp.passes.schedule.away import spilled_instances
from adjcomp.passes.schedule.instance import Menu, build_instance
from adjcomp.passes.schedule.needs import NEVER, Host, Needs
from adjcomp.passes.schedule.nested import Charges, Nesting
from adjcomp.passes.schedule.search import build_plan
from adjcomp.passes.schedule.tiers import Pair, pairs_of, tiered_candidates

FAST = HostTier(1 << 40, 25e9, 5e-6)
FREE_LINK = HostTier(1 << 40, 1e18, 0.0)


def heavy(chunk: int = 128) -> StackCosts:
    """A stack whose borders weigh more than its internals."""
    return regular_stack(4096, chunk, 4, width=16, state=40_000)


def border_bytes(costs: StackCosts) -> int:
    """Bytes of a set of borders."""
    return sum(tile.carry_bytes for tile in costs.layers)


def pair_of(costs: StackCosts, places: int, link: HostTier = FREE_LINK) -> Pair:
    """Nested plans of `costs` with so many places on the host."""
    resident = [build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes))]
    host = replace(link, budget_bytes=places * border_bytes(costs))
    (pair,) = pairs_of(resident, spilled_instances(resident, "gpu", host))
    return pair


def plan_with(costs: StackCosts, budget: int, host: HostTier | None) -> Plan:
    """The plan at one chunk length."""
    return solve(
        lambda _: costs,
        seq_len=costs.seq_len,
        budget_bytes=budget,
        candidates=(costs.chunk,),
        device="gpu",
        options=Options(),
        host=host,
    )


def least(costs: StackCosts, host: HostTier | None) -> int:
    """The minimum that the planner names."""
    with pytest.raises(BudgetError) as caught:
        plan_with(costs, 1, host)
    assert sum(caught.value.contributors.values()) == caught.value.minimum_bytes
    return caught.value.minimum_bytes


@pytest.mark.parametrize("sets", [2, 3, 8, 16])
def test_a_host_with_room_for_some_borders_beats_a_device_alone(sets: int) -> None:
    """Given a device and a host that have room for few borders each, then both are used, and fewer borders are recomputed."""
    costs = heavy()
    host = replace(FAST, budget_bytes=sets * border_bytes(costs))
    smallest, alone = least(costs, host), least(costs, None)
    assert smallest <= alone - min(sets, 4) * border_bytes(costs)
    for budget in (smallest, alone):
        plan = plan_with(costs, budget, host)
        plan.verify()
        assert {Offload, Fetch, Advance} <= {type(action) for action in plan.actions}
        assert max(plan.peak_bytes["gpu"], budget - border_bytes(costs)) <= budget
        assert 0 < plan.host_peak_bytes["gpu"] <= host.budget_bytes
        assert plan.gap < 1e-3
        again = Plan.from_json(plan.to_json())
        assert again == plan
        again.verify()
    assert plan.seconds < 0.95 * plan_with(costs, alone, None).seconds


def every_nesting(start: int, count: int, depth: int, whole: bool) -> Iterator[tuple[tuple[Run, int], ...]]:
    """Every way to reverse `count` chunks from `start`, with the borders stored at each piece; `whole`: after a first forward,
    whose pieces are as advances here.
    """
    if count == 1:
        yield ((Run(start, start), depth),)
    for j in range(1, count):
        for behind in every_nesting(start + j, count - j, depth + 1, whole):
            for before in every_nesting(start, j, depth, False):
                yield ((Run(start, start + j), -depth if whole else depth), *behind, *before)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_the_program_finds_the_best_plan_of_its_space(seed: int) -> None:
    """Given a tiny stack and a link that takes no time, when every plan in two tiers is written and replayed, then each stays
    within what is counted for it, and none that fits is faster than the program's.
    """
    costs = random_stack(seed, layers=1, chunks=3 + (seed >= 12) * seed % 2)
    if border_bytes(costs) == 0:
        return
    pair = pair_of(costs, 1 + seed % 3)
    found = list(_every_plan(costs, pair))
    minimum = Needs(pair.resident, pair.host).minimum()
    for budget in sorted({max(need, minimum) for need, _ in found})[:: max(1, len(found) // 5)]:
        best = min(seconds for need, seconds in found if need <= budget)
        nested = Nesting(pair.resident, budget, pair.host).solve()
        assert nested is not None
        assert nested.ticks * pair.resident.tick == pytest.approx(best, rel=1e-9)
        (made,) = tiered_candidates([pair], budget, 1e9)
        assert made.seconds == pytest.approx(best, rel=1e-6)
        assert made.bound_seconds <= best * (1 + 1e-9)


def _every_plan(costs: StackCosts, pair: Pair) -> Iterator[tuple[int, float]]:
    """(bytes counted, seconds) of every plan in two tiers."""
    needs, last = Needs(pair.resident, pair.host), costs.chunk_count - 1
    for pieces in every_nesting(0, costs.chunk_count, 1, True):
        runs = tuple(run for run, depth in pieces if depth > 0)
        moving = [
            needs.advance(depth, run.end - run.first) if depth > 0 else needs.forward(-depth, run.end - run.first)
            for run, depth in pieces
            if run.end > run.first
        ]
        reversals = sorted((run.first, depth) for run, depth in pieces if run.end == run.first)
        menus = [needs.reversing(depth, last=chunk == last) for chunk, depth in reversals]
        for number, options in enumerate(itertools.product(*(range(len(menu)) for menu in menus))):
            counted = [
                int(menu.need[j]) + needs.beside(depth) for menu, j, (_, depth) in zip(menus, options, reversals, strict=True)
            ]
            need = max(pair.resident.fixed_bytes, *moving, *counted)
            modes = [menu.options.mode(j, menu.column) for menu, j in zip(menus, options, strict=True)]
            plan = build_plan(costs, emit_nested(costs, modes, runs, pair.host.tier), 1 << 30, "gpu", FREE_LINK)
            if number % 8 == 0:
                plan.verify()
            assert plan.peak_bytes["gpu"] <= need
            assert plan.host_peak_bytes["gpu"] <= pair.host.places * border_bytes(costs)
            yield need, plan.seconds


@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 4),
    chunks=st.integers(3, 12),
    places=st.integers(1, 12),
    spare=st.integers(0, 60),
    ahead=st.booleans(),
)
def test_every_plan_in_two_tiers_verifies_within_its_budgets(
    seed: int, layers: int, chunks: int, places: int, spare: int, ahead: bool
) -> None:
    """Given any stack, host and budget, then the program's plan keeps both budgets and takes the seconds that were counted."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    if border_bytes(costs) == 0:
        return
    pair = pair_of(costs, places)
    host = pair.host.brought_ahead() if ahead else pair.host
    budget = Needs(pair.resident, host).minimum() + spare
    nested = Nesting(pair.resident, budget, host).solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs, host.tier), budget, "gpu", FREE_LINK)
    plan.verify()
    assert plan.host_peak_bytes["gpu"] <= host.places * border_bytes(costs)
    assert plan.seconds == pytest.approx(nested.ticks * pair.resident.tick, rel=1e-9)
    alone = Nesting(pair.resident, budget).solve()
    assert ahead or alone is None or nested.ticks <= alone.ticks
    assert Nesting(pair.resident, budget, host, Charges(offload=5, bring=7)).least() >= nested.ticks


@pytest.mark.parametrize("bandwidth", [1e9, 2e8, 2e7])
@pytest.mark.parametrize("sets", [1, 6])
def test_a_slow_link_costs_what_is_promised_and_never_more_than_none(bandwidth: float, sets: int) -> None:
    """Given any link, then the plan with a host is no slower than without, and the bound holds for both and for any budget."""
    costs = heavy()
    link = HostTier(sets * border_bytes(costs), bandwidth, 5e-6)
    alone = plan_with(costs, least(costs, None), None)
    plan = plan_with(costs, least(costs, None), link)
    plan.verify()
    assert plan.seconds <= alone.seconds * (1 + 1e-9)
    assert plan.lower_bound_seconds <= plan.seconds
    for ahead, places in itertools.product((False, True), {1, sets // 2, sets} - {0}):
        host = replace(pair_of(costs, sets, link).host, places=places)
        host = host.brought_ahead() if ahead else host
        for charges in (Charges(), Charges(bring=1 << 44), Charges(bring=1 << 46)):
            nested = Nesting(pair_of(costs, sets, link).resident, least(costs, None), host, charges).solve()
            if nested is not None:
                other = build_plan(costs, emit_nested(costs, nested.modes, nested.runs, host.tier), 1 << 40, "gpu", link)
                assert other.seconds >= plan.lower_bound_seconds * (1 - 1e-9)


def small_plan() -> Plan:
    """A plan in two tiers that loads and fetches."""
    costs = regular_stack(640, 64, 2, state=5000)
    pair = pair_of(costs, 2, FAST)
    nested = Nesting(pair.resident, Needs(pair.resident, pair.host).minimum(), pair.host).solve()
    assert nested is not None
    return build_plan(costs, emit_nested(costs, nested.modes, nested.runs, pair.host.tier), 1 << 30, "gpu", FAST)


def test_a_plan_in_two_tiers_without_any_one_action_is_rejected() -> None:
    plan = small_plan()
    plan.verify()
    assert {Offload, Load, Fetch, Advance} <= {type(action) for action in plan.actions}
    for index in range(len(plan.actions)):
        with pytest.raises(VerifyError):
            replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :]).verify()


def test_what_is_wrong_with_a_load_is_named() -> None:
    plan = small_plan()
    at = next(i for i, action in enumerate(plan.actions) if isinstance(action, Load))
    load = plan.actions[at]
    assert isinstance(load, Load)

    def error(*actions: Action) -> str:
        with pytest.raises(VerifyError) as caught:
            replace(plan, actions=actions).verify()
        return str(caught.value).splitlines()[0]

    assert f"loads {load.value}, which isn't on the host" in error(load, *plan.actions)
    assert f"writes {load.value}, which is live already" in error(*plan.actions[: at + 1], load, *plan.actions[at + 1 :])
    as_fetch = Fetch(load.value, stream=1)
    assert f"loads {load.value}, which isn't on the host" in error(*plan.actions[:at], as_fetch, *plan.actions[at + 1 :])
    after = replace(plan.actions[at + 1], frees=(*plan.actions[at + 1].frees, load.value))
    assert "was never read" in error(*plan.actions[: at + 1], after, *plan.actions[at + 2 :])


def test_borders_are_offloaded_once_while_they_are_needed() -> None:
    """Given a plan in two tiers, then a border goes to the host and is fetched as often as it is made, and loads come between."""
    plan = small_plan()
    moves = {kind: Counter(a.value for a in plan.actions if isinstance(a, kind)) for kind in (Offload, Fetch, Load)}
    assert moves[Offload] == moves[Fetch]
    assert set(moves[Load]) <= set(moves[Offload])
    graph = plan.graph
    for index, action in enumerate(plan.actions):
        if isinstance(action, Load | Fetch):
            (before,) = graph.predecessors(index)
            assert isinstance(plan.actions[before], Offload)


def test_more_places_than_borders_recompute_none() -> None:
    costs = heavy(512)
    pair = pair_of(costs, 100)
    assert pair.host.places == costs.chunk_count - 1
    nested = Nesting(pair.resident, Needs(pair.resident, pair.host).minimum() + border_bytes(costs), pair.host).solve()
    assert nested is not None
    assert all(run.first == run.end for run in nested.runs)
    assert Nesting(pair.resident, 1, pair.host).solve() is None
    assert Nesting(pair.resident, 1, pair.host).least() == NEVER
    menu: Menu = Needs(pair.resident, Host(pair.host.spilled, 3)).reversing(4, last=False)
    assert menu is pair.host.spilled.lean_menu
