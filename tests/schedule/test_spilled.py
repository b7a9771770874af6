"""Plans whose borders wait on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import random_stack, regular_stack

from adjcomp.errors import BudgetError, VerifyError
from adjcomp.ir.actions import Action, Advance
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import HostTier, Plan, Share
from adjcomp.ir.transfers import Fetch, Offload
from adjcomp.options import Options
from adjcomp.passes.away import ToHost, emit_away
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule import solve
from adjcomp.passes.schedule.away import holds_all, spilled_instances
from adjcomp.passes.schedule.instance import build_instance
from adjcomp.passes.schedule.partly import Split, partly, splits_of
from adjcomp.passes.schedule.search import build_plan

FAST = HostTier(1 << 40, 25e9, 5e-6)
LENGTHS = (128, 256, 512)


def heavy(chunk: int, seq_len: int = 4096) -> StackCosts:
    """A stack whose borders weigh more than its internals."""
    return regular_stack(seq_len, chunk, 4, width=16, state=40_000)


def plan_with(costs: Callable[[int], StackCosts], budget: int, host: HostTier | None, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    """The plan of a cost function, with a host tier or without."""
    seq_len = costs(lengths[0]).seq_len
    return solve(costs, seq_len=seq_len, budget_bytes=budget, candidates=lengths, device="gpu", options=Options(), host=host)


def least(costs: Callable[[int], StackCosts], host: HostTier | None, lengths: tuple[int, ...] = LENGTHS) -> int:
    """The minimum that the planner names."""
    with pytest.raises(BudgetError) as caught:
        plan_with(costs, 1, host, lengths)
    assert sum(caught.value.contributors.values()) == caught.value.minimum_bytes
    return caught.value.minimum_bytes


def small_plan(ahead: bool = False, host: HostTier = FAST) -> Plan:
    """A spilled plan of five chunks and two layers."""
    costs = regular_stack(320, 64, 2, state=5000)
    modes = [ColumnMode(0), ColumnMode(0), ColumnMode(1), ColumnMode(2), ColumnMode(3)]
    return build_plan(costs, emit_away(ToHost(costs, ahead), modes), 1 << 30, "gpu", host)


def test_below_what_resident_borders_need_spilled_plans_beat_nested_ones() -> None:
    """Given a link that is fast enough, when borders don't fit the device, then they wait on the host and nothing is nested."""
    resident = least(heavy, None)
    smallest = least(heavy, FAST)
    assert smallest < 0.6 * resident
    for budget in (resident, round(1.3 * resident)):
        without, spilled = plan_with(heavy, budget, None), plan_with(heavy, budget, FAST)
        spilled.verify()
        assert spilled.seconds < 0.85 * without.seconds
        assert any(isinstance(a, Offload) for a in spilled.actions)
        assert not any(isinstance(a, Advance) for a in spilled.actions)
        assert spilled.host_peak_bytes["gpu"] <= FAST.budget_bytes
        assert spilled.gap < 0.01
    at_the_minimum = plan_with(heavy, smallest, FAST)
    at_the_minimum.verify()
    assert at_the_minimum.peak_bytes["gpu"] == smallest


@pytest.mark.parametrize("bandwidth", [1e12, 2e9, 1e8, 1e6])
def test_a_slow_link_is_used_only_where_it_pays(bandwidth: float) -> None:
    """Given any link, then a plan with a host tier is no slower than the one without, and its bound holds for both."""
    budget = round(1.2 * least(heavy, None))
    without = plan_with(heavy, budget, None)
    spilled = plan_with(heavy, budget, replace(FAST, bandwidth=bandwidth))
    spilled.verify()
    assert spilled.seconds <= without.seconds * (1 + 1e-9)
    assert spilled.lower_bound_seconds <= spilled.seconds
    assert bool(spilled.host_peak_bytes) == (spilled.seconds < without.seconds)


def test_a_host_without_room_changes_nothing() -> None:
    budget = round(1.2 * least(heavy, None))
    plan = plan_with(heavy, budget, replace(FAST, budget_bytes=1000))
    assert plan.actions == plan_with(heavy, budget, None).actions
    assert plan.shares[0].host is None


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
def test_no_spilled_plan_is_faster_than_the_bound_and_the_planner_finds_the_best(seed: int) -> None:
    """Given a tiny stack and a link that takes no time, when every plan is written and replayed, then the best fits the bound."""
    costs = random_stack(seed, layers=1 + (seed >= 10) * seed % 2, chunks=3)
    link = HostTier(1 << 30, 1e15, 0.0)
    if not any(tile.carry_bytes for tile in costs.layers):
        return
    instance = build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes, host=link))
    found = []
    choices = [range(len(menu)) for menu in (instance.menus[kind] for kind in instance.kinds())]
    for number, choice in enumerate(itertools.product(*choices)):
        totals = build_plan(costs, emit_away(ToHost(costs, False), instance.modes(choice)), 1 << 40, "gpu", link)
        if number % 16 == 0:
            totals.verify()
        needs = [int(instance.menus[kind].need[j]) for kind, j in zip(instance.kinds(), choice, strict=True)]
        left = [int(instance.menus[kind].left[j]) for kind, j in zip(instance.kinds(), choice, strict=True)]
        predicted = max(instance.fixed_bytes, *(sum(left[:c]) + needs[c] for c in range(len(needs))))
        assert totals.peak_bytes["gpu"] <= predicted
        found.append((predicted, totals.seconds))
    for budget in sorted({need for need, _ in found})[:: max(1, len(found) // 4)]:
        best = min(seconds for need, seconds in found if need <= budget)
        plan = plan_with(lambda _: costs, budget, link, (4,))
        plan.verify()
        assert plan.lower_bound_seconds <= best * (1 + 1e-9)
        assert plan.seconds <= best * (1 + 1e-6)


@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 4),
    chunks=st.integers(3, 9),
    ahead=st.booleans(),
    rate=st.floats(0.5, 500),
    oldest=st.integers(0, 9) | st.none(),
)
def test_any_modes_can_be_spilled(seed: int, layers: int, chunks: int, ahead: bool, rate: float, oldest: int | None) -> None:
    """Given any stack and modes, when all or its oldest borders are spilled, then the plan replays, and its text round-trips."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    if not any(tile.carry_bytes for tile in costs.layers):
        return
    menus = build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes)).menus
    modes = [menus[1].options.mode((seed + 7 * c) % len(menus[1]), menus[1].column) for c in range(chunks)]
    plan = build_plan(costs, emit_away(ToHost(costs, ahead, oldest), modes), 1 << 30, "gpu", HostTier(1 << 20, rate, 0.01))
    read = {a.value.chunk for a in plan.actions if isinstance(a, Fetch)}
    assert read <= set(range(-1, (chunks - 1 if oldest is None else min(oldest, chunks - 1)) - 1))
    plan.verify()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    again.verify()
    flat = build_plan(costs, emit(costs, modes), 1 << 30, "gpu")
    assert plan.seconds >= flat.seconds * (1 - 1e-9)
    assert [type(a) for a in plan.actions if not isinstance(a, Offload | Fetch)] == [type(a) for a in flat.actions]


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 4), chunks=st.integers(4, 12), share=st.floats(0, 1))
def test_plans_that_spill_the_oldest_borders_stay_within_what_is_promised(
    seed: int, layers: int, chunks: int, share: float
) -> None:
    """Given any stack and a host with room for some of its borders, when these are spilled, then the plan keeps its budget."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    border = sum(tile.carry_bytes for tile in costs.layers)
    if border == 0:
        return
    host = replace(FAST, budget_bytes=border * max(1, round(share * chunks)), bandwidth=1e15, latency=0.0)
    (split,) = _splits(costs, host)
    for more in (0, 7, 60):
        budget = split.minimum() + more
        made = partly(split, budget, math.inf, 0.0, lambda _: 0.0)
        assert made is not None
        plan = build_plan(costs, made.actions(), budget, "gpu", host)
        plan.verify()
        assert 1 <= made.oldest <= split.most
        assert plan.seconds == pytest.approx(made.seconds, rel=1e-6)
    assert partly(split, split.minimum() - 1, math.inf, 0.0, lambda _: 0.0) is None


def _splits(costs: StackCosts, host: HostTier) -> list[Split]:
    resident = [build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes))]
    return splits_of(resident, spilled_instances(resident, "gpu", host))


@pytest.mark.parametrize("sets", [2, 4, 6])
def test_a_host_with_room_for_some_borders_takes_the_oldest(sets: int) -> None:
    """Given a host that is too small for all borders, when the device is too small as well, then the oldest wait on the host, and
    nothing is nested."""
    costs = heavy(512)
    border = sum(tile.carry_bytes for tile in costs.layers)
    host = replace(FAST, budget_bytes=sets * border)
    (split,) = _splits(costs, host)
    assert not holds_all(split.spilled)
    budget = split.minimum()
    plan = plan_with(lambda _: costs, budget, host, (512,))
    plan.verify()
    assert {action.value.chunk for action in plan.actions if isinstance(action, Offload)} == set(range(-1, sets - 1))
    assert not any(isinstance(action, Advance) for action in plan.actions)
    assert 0 < plan.host_peak_bytes["gpu"] <= host.budget_bytes
    resident = max(budget, least(heavy, None, (512,)))
    assert plan.seconds < plan_with(lambda _: costs, resident, None, (512,)).seconds or resident > budget
    assert plan.gap < 0.05


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_slow_link_never_makes_a_plan_slower(share: float) -> None:
    """Given a link that all borders keep busy for as long as the step, then a plan is never slower than without it."""
    costs = heavy(256)
    border = sum(tile.carry_bytes for tile in costs.layers)
    resident, smallest = least(heavy, None, (256,)), least(heavy, FAST, (256,))
    flat = plan_with(lambda _: costs, 1 << 40, None, (256,))
    host = replace(FAST, bandwidth=2 * costs.chunk_count * border / flat.seconds)
    budget = round(smallest + share * (resident + 12 * border - smallest))
    plan = plan_with(lambda _: costs, budget, host, (256,))
    plan.verify()
    assert plan.lower_bound_seconds <= plan.seconds
    if budget >= resident:
        assert plan.seconds <= plan_with(lambda _: costs, budget, None, (256,)).seconds * (1 + 1e-9)


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 3), chunks=st.integers(4, 9), sets=st.integers(1, 9))
def test_a_larger_budget_or_host_is_never_slower_beyond_the_gap(seed: int, layers: int, chunks: int, sets: int) -> None:
    """Given any stack and link, when the device or its host gets more memory, then the plan is as fast, up to the gap."""
    costs = random_stack(seed, layers=layers, chunks=chunks)
    border = sum(tile.carry_bytes for tile in costs.layers)
    if border == 0:
        return
    host = HostTier(sets * border, 20 * border, 0.01)
    budget = least(lambda _: costs, host, (4,))
    before = plan_with(lambda _: costs, budget, host, (4,))
    before.verify()
    for more, larger in (
        (15, host),
        (15, replace(host, budget_bytes=20 * border)),
        (80, replace(host, budget_bytes=20 * border)),
    ):
        budget += more
        plan = plan_with(lambda _: costs, budget, larger, (4,))
        plan.verify()
        assert plan.seconds * (1 - plan.gap) <= before.seconds * (1 + 1e-9)
        before = plan


def test_a_spilled_plan_without_any_one_action_is_rejected() -> None:
    plan = small_plan()
    plan.verify()
    for index in range(len(plan.actions)):
        with pytest.raises(VerifyError):
            replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :]).verify()


def test_what_is_wrong_with_a_spilled_plan_is_named() -> None:
    plan = small_plan()
    offload = next(a for a in plan.actions if isinstance(a, Offload))
    fetch = next(a for a in plan.actions if isinstance(a, Fetch))

    def error(actions: tuple[Action, ...], host: HostTier | None = FAST) -> str:
        with pytest.raises(VerifyError) as caught:
            replace(plan, actions=actions, shares=(replace(plan.shares[0], host=host),)).verify()
        return str(caught.value).splitlines()[0]

    assert "fetches s[1,-1], which isn't on the host" in error((Fetch(offload.value), *plan.actions))
    without_fetch = tuple(a for a in plan.actions if a is not fetch)
    assert f"reads {fetch.value}, which isn't live" in error(without_fetch)
    again = [x for a in plan.actions for x in ((a, a) if a is offload else (a,))]
    assert "which is on the host already" in error(tuple(again))
    twice = [x for a in plan.actions for x in ((a, a) if a is fetch else (a,))]
    assert f"fetches {fetch.value}, which isn't on the host" in error(tuple(twice))
    assert "over its budget" in error(plan.actions, replace(FAST, budget_bytes=50_000))
    assert "has no host tier" in error(plan.actions, None)
    unread = next(a for a in plan.actions if isinstance(a, Offload) and a.value.chunk == 1)
    reading = next(i for i, a in enumerate(plan.actions) if isinstance(a, Fetch) and a.value == unread.value)
    dropped = replace(plan.actions[reading + 1], frees=(*plan.actions[reading + 1].frees, unread.value))
    assert "being fetched and was never read" in error((*plan.actions[: reading + 1], dropped, *plan.actions[reading + 2 :]))
    with_frees = tuple(replace(a, frees=(a.value,)) if a is offload else a for a in plan.actions)
    assert "only a computation drops values" in error(with_frees)


def test_a_value_that_stays_on_the_host_is_named() -> None:
    plan = small_plan()
    last = plan.costs.chunk_count - 1
    at = next(i for i, a in enumerate(plan.actions) if getattr(a, "chunk", None) == last and type(a).__name__ == "Loss")
    value = next(v for a in plan.actions for v in a.writes(plan.costs) if str(v) == f"s[1,{last - 1}]")
    with pytest.raises(VerifyError, match="never fetched"):
        replace(plan, actions=(*plan.actions[:at], Offload(value), *plan.actions[at:])).verify()


@pytest.mark.parametrize("ahead", [False, True])
def test_computations_wait_for_what_a_slow_link_brings(ahead: bool) -> None:
    """Given a slow link, then the step takes longer by the waiting, and what is promised is what the replay finds."""
    quick, slow = small_plan(ahead), small_plan(ahead, replace(FAST, bandwidth=2e6))
    slow.verify()
    assert slow.seconds > quick.seconds
    assert slow.peak_bytes == quick.peak_bytes
    assert quick.actions == slow.actions
    wrong = replace(slow, certificate=replace(slow.certificate, seconds=quick.seconds))
    with pytest.raises(VerifyError, match="the actions take"):
        wrong.verify()
    host = replace(slow, certificate=replace(slow.certificate, host_peak_bytes={}))
    with pytest.raises(VerifyError, match="host peaks"):
        host.verify()


def test_the_graph_hands_values_from_offloads_to_fetches() -> None:
    plan = small_plan()
    graph = plan.graph
    fetches = [i for i, a in enumerate(plan.actions) if isinstance(a, Fetch)]
    assert fetches
    for i in fetches:
        (before,) = graph.predecessors(i)
        assert isinstance(plan.actions[before], Offload)
        assert graph.edges[before, i]["bytes"] == 20_000
