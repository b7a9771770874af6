"""Layer-major plans: against every one there is on tiny instances, and in the race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from segmented import every_segmentation, layered_stack
from synthetic import regular_stack

from adjcomp.errors import BudgetError, VerifyError
from adjcomp.ir.actions import Publish
from adjcomp.ir.costs import Gradient, StackCosts
from adjcomp.ir.order import segments_of
from adjcomp.ir.plan import Plan, Share
from adjcomp.options import Options
from adjcomp.passes.layermajor import Segment, emit_layer_major
from adjcomp.passes.schedule import layered, solve
from adjcomp.passes.schedule.instance import Instance, build_instance
from adjcomp.passes.schedule.layered import Layering, is_possible
from adjcomp.passes.schedule.search import build_plan
from adjcomp.passes.simulate import simulate

ROOMY = 1 << 40
POSSIBLE = [seed for seed in range(300) if is_possible(layered_stack(seed))]
SEEDS = [*POSSIBLE[:5], *(pytest.param(seed, marks=pytest.mark.slow) for seed in POSSIBLE[5:])]


def instance_of(costs: StackCosts) -> Instance:
    return build_instance(costs, Share("cpu", ROOMY, costs.resident_bytes, costs.turn_bytes))


def every_plan(costs: StackCosts) -> dict[tuple[Segment, ...], tuple[int, float]]:
    """(peak, seconds) of every layer-major plan, by emitting and simulating it."""
    share = Share("cpu", ROOMY, costs.resident_bytes, costs.turn_bytes)
    found = {}
    for segments in every_segmentation(costs):
        totals = simulate(costs, (share,), emit_layer_major(costs, segments))
        found[segments] = totals.peak_bytes["cpu"], totals.seconds
    return found


def planned(costs: StackCosts, budget: int) -> Plan:
    return solve(lambda _: costs, seq_len=costs.seq_len, budget_bytes=budget, candidates=[4], device="cpu", options=Options())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_segments_need_is_what_their_actions_take(seed: int) -> None:
    """Given any cut into segments, when its rows are added up, then they are the peak of the plan to the byte, which verifies."""
    costs = layered_stack(seed)
    layering = Layering(instance_of(costs))
    for segments, (peak, _) in every_plan(costs).items():
        left = need = 0
        for segment in segments:
            table = layering.needs[segment.held]
            need = max(need, left + int(table.need[segment.first, segment.last]))
            left += int(table.left[segment.first, segment.last])
        assert need == peak, segments
    segments = max(every_segmentation(costs), key=len)
    plan = build_plan(costs, emit_layer_major(costs, segments), ROOMY, "cpu")
    plan.verify()
    assert Plan.from_json(plan.to_json()) == plan
    assert segments_of(plan) == tuple((segment.first, segment.last) for segment in segments)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_all_orders_is_found_and_no_bound_is_above_it(seed: int) -> None:
    """Given every layer-major plan, when solved at interesting budgets, then the best is found and bounds are below it."""
    costs = layered_stack(seed)
    instance, plans = instance_of(costs), every_plan(costs)
    layering = Layering(instance)
    peaks = sorted({peak for peak, _ in plans.values()})
    least, segments = layering.minimum()
    assert least == peaks[0] == plans[segments][0]
    assert layering.solve(least - 1) is None
    for budget in {peaks[0], peaks[len(peaks) // 3], peaks[-1]}:
        best = min(seconds for peak, seconds in plans.values() if peak <= budget)
        found = layering.solve(budget)
        assert found is not None
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert found.bound_seconds <= best * (1 + 1e-12)
        assert layering.quick_bound(budget) * instance.tick <= best * (1 + 1e-12)
        plan = planned(costs, budget)
        plan.verify()
        assert plan.seconds <= best * (1 + 1e-9)
        assert plan.lower_bound_seconds <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", POSSIBLE[8:14])
def test_the_minimum_is_the_smaller_of_both_orders(seed: int) -> None:
    costs = layered_stack(seed)
    with pytest.raises(BudgetError) as caught:
        planned(costs, 1)
    least = caught.value.minimum_bytes
    assert least <= Layering(instance_of(costs)).minimum()[0]
    assert sum(caught.value.contributors.values()) == least
    plan = planned(costs, least)
    plan.verify()
    assert plan.peak_bytes["cpu"] == least
    with pytest.raises(BudgetError):
        planned(costs, least - 1)


def test_with_few_states_the_bound_stays_below_and_the_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered, "MOST_STATES", 2)
    for seed in POSSIBLE[:3]:
        costs = layered_stack(seed)
        plans = every_plan(costs)
        budget = sorted(peak for peak, _ in plans.values())[len(plans) // 2]
        best = min(seconds for peak, seconds in plans.values() if peak <= budget)
        found = Layering(instance_of(costs)).solve(budget)
        assert found is not None
        assert found.bound_seconds <= best * (1 + 1e-12)
        assert plans[found.segments][0] <= budget


def heavy(chunk: int, layers: int = 6) -> StackCosts:
    """A short sequence through layers whose gradients outweigh all else."""
    costs = regular_stack(1024, chunk, layers)
    gradients = tuple(Gradient((k,), 8_000_000, 4_000_000) for k in range(1, layers + 1))
    return replace(costs, gradients=gradients, turn_bytes={"gradients": 8_000_000 * layers})


def test_where_gradients_outweigh_the_rest_layers_come_first(
    plan_for: Callable[..., Plan], least_budget: Callable[..., int]
) -> None:
    """Given heavy gradients, when planned, then layer-major plans fit where no other does, and say what they are."""
    least = least_budget(heavy, [64, 128])
    flat = least_budget(lambda chunk: replace(heavy(chunk), gradients=()), [64, 128])
    assert least < 0.65 * flat
    plan = plan_for(heavy, least, [64, 128])
    plan.verify()
    assert len(segments_of(plan)) > 1
    assert "layer-major: all chunks through layers stem" in str(plan)
    assert "layer-major" in plan.certificate.space
    assert plan.gap <= 0.001


def test_every_single_change_that_matters_is_noticed() -> None:
    """Given a layer-major plan, when any action is left out, doubled or drops other values, then it doesn't verify."""
    costs = layered_stack(POSSIBLE[3])
    segments = max(every_segmentation(costs), key=lambda each: (len(each), not each[0].held))
    plan = build_plan(costs, emit_layer_major(costs, segments), ROOMY, "cpu")
    plan.verify()
    for index, action in enumerate(plan.actions):
        before, after = plan.actions[:index], plan.actions[index + 1 :]
        changed = [
            (),
            (action, action),
            *((replace(action, frees=tuple(v for v in action.frees if v != f)),) for f in action.frees),
        ]
        for instead in changed:
            with pytest.raises(VerifyError):
                replace(plan, actions=(*before, *instead, *after)).verify()


def test_a_layer_is_published_once_all_its_chunks_are_done() -> None:
    costs = heavy(256, layers=2)
    segments = [Segment(0, 1, False), Segment(2, 3, True)]
    plan = build_plan(costs, emit_layer_major(costs, segments), ROOMY, "cpu")
    place = next(i for i, action in enumerate(plan.actions) if isinstance(action, Publish) and action.layer == 2)
    early = (*plan.actions[: place - 2], plan.actions[place], *plan.actions[place - 2 : place], *plan.actions[place + 1 :])
    with pytest.raises(VerifyError, match="no complete gradients"):
        replace(plan, actions=early).verify()


@pytest.mark.parametrize("ends", [[(0, 1)], [(0, 1), (3, 3)], [(1, 1), (2, 3)], [(0, 3), (4, 3)]])
def test_segments_that_leave_layers_out_are_refused(ends: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="aren't the layers 0 to 3"):
        emit_layer_major(heavy(256, layers=2), [Segment(first, last, False) for first, last in ends])
