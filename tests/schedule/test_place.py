"""Plans for several devices: they verify, keep their budgets and their bounds, and say what doesn't fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import eight_unequal_devices, hybrid_stack, layered_residency, random_stack, regular_stack, unequal_machine

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts, Tie
from adjcomp.ir.plan import Plan
from adjcomp.ir.residency import Item, Residency
from adjcomp.ir.transfers import Send, SumTied
from adjcomp.machine import GIB, Machine, parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine
from adjcomp.passes.schedule import solve

PLACEMENTS = ["layers", "time", "grid"]
EXAMPLES = settings().max_examples


def placed(costs: StackCosts, machine: Machine, budget: int, placement: str | None, shape: tuple[int, int] | None = None) -> Plan:
    """A plan of `costs`, verified, and its saved form read again."""
    plan = solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=machine,
        seq_len=costs.seq_len,
        budget_bytes=budget,
        candidates=[costs.chunk],
        options=Options(placement=placement),
        shape=shape,
    )
    plan.verify()
    assert Plan.from_json(plan.to_json()) == plan
    assert all(plan.peak_bytes[name] <= plan.budget_bytes[name] for name in plan.peak_bytes)
    return plan


@given(
    st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 7), st.integers(2, 4), st.sampled_from(["layers", "time", "grid"])
)
@settings(max_examples=3 * EXAMPLES, deadline=None)
def test_every_stack_gets_a_plan_that_verifies(seed: int, layers: int, chunks: int, count: int, placement: str) -> None:
    plan = placed(random_stack(seed, layers=layers, chunks=chunks), unequal_machine(count, seed), GIB, placement)
    assert len(plan.peak_bytes) == count


@given(st.integers(0, 10_000), st.integers(2, 4), st.sampled_from(["layers", "time", "grid", None]))
@settings(max_examples=max(1, EXAMPLES // 2), deadline=None)
def test_the_least_budget_plans_and_less_does_not(seed: int, count: int, placement: str | None) -> None:
    costs, machine = random_stack(seed, layers=4, chunks=6), unequal_machine(count, seed)
    with pytest.raises(BudgetError) as caught:
        placed(costs, machine, 1, placement)
    least = caught.value.minimum_bytes
    placed(costs, machine, least, placement)
    with pytest.raises(BudgetError):
        placed(costs, machine, int(least * 0.9) - 1, placement)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 7), st.sampled_from([(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_stack_gets_a_plan_on_a_grid_with_little_memory(
    seed: int, layers: int, chunks: int, shape: tuple[int, int]
) -> None:
    costs, machine = random_stack(seed, layers=layers, chunks=shape[1] + chunks), unequal_machine(shape[0] * shape[1], seed)
    with pytest.raises(BudgetError) as caught:
        placed(costs, machine, 1, "grid", shape)
    for times in (1, 2, 1000):
        placed(costs, machine, times * caught.value.minimum_bytes, "grid", shape)


def test_a_grid_beats_layers_and_time_where_many_devices_wait_for_each_other() -> None:
    costs, machine = regular_stack(65536, 512, 22), parse_machine("cpu:16")
    seconds = {
        placement: placed(costs, machine, 200_000_000, placement).seconds for placement in ("layers", "time", "grid", None)
    }
    assert seconds["grid"] < 0.95 * min(seconds["layers"], seconds["time"])
    assert seconds[None] == seconds["grid"]


def test_in_a_grid_a_lane_hands_on_states_and_a_stage_residual_chunks() -> None:
    plan = placed(regular_stack(4096, 256, 6), parse_machine("cpu:6"), GIB, "grid", (2, 3))
    sends = [action for action in plan.actions if isinstance(action, Send)]
    assert {a.value.kind.value for a in sends if abs(a.device - a.to) == 3} == {"x", "g"}
    assert {a.value.kind.value for a in sends if a.device // 3 == a.to // 3} == {"s", "lam"}
    assert all(abs(a.device - a.to) == 3 or a.device // 3 == a.to // 3 for a in sends)


def test_in_a_grid_shared_parameters_are_added_up_once() -> None:
    costs = replace(regular_stack(4096, 256, 6), ties=(Tie((0, 7), 4000),))
    plan = placed(costs, parse_machine("cpu:4"), GIB, "grid", (2, 2))
    assert sum(isinstance(action, SumTied) for action in plan.actions) == 4
    together = placed(costs, parse_machine("cpu:4"), GIB, "grid", (1, 4))
    assert not any(isinstance(action, SumTied) for action in together.actions)


@pytest.mark.parametrize("placement", ["layers", "time", "grid"])
def test_four_devices_are_much_faster_than_two(placement: str) -> None:
    costs = regular_stack(65536, 512, 16)
    two, four = (placed(costs, parse_machine(f"cpu:{n}"), 200_000_000, placement).seconds for n in (2, 4))
    assert four < 0.6 * two


def activations(plan: Plan) -> int:
    """Bytes of the largest peak among devices, without what belongs to layers rather than to chunks."""
    fixed = ("parameters", "gradients", "optimizer", "buffers", "inputs", "outputs")
    return max(
        sum(size for kind, size in kinds.items() if kind not in fixed) for kinds in plan.certificate.bytes_by_kind.values()
    )


@pytest.mark.parametrize("placement", ["layers", "grid"])
def test_with_everything_kept_devices_share_the_activations(placement: str) -> None:
    costs, options = regular_stack(16384, 256, 14), Options()
    alone = solve(lambda _: costs, seq_len=16384, budget_bytes=20 * GIB, candidates=[256], device="cpu", options=options)
    for count in (2, 4, 8):
        plan = placed(costs, parse_machine(f"cpu:{count}"), 20 * GIB, placement)
        assert activations(plan) <= activations(alone) / (0.6 * count), count


@pytest.mark.parametrize("placement", ["layers", "time"])
def test_with_the_least_budget_more_devices_have_less_activations_each(placement: str) -> None:
    found = []
    for count in (2, 4, 8):
        costs, machine = regular_stack(16384, 128, 14), parse_machine(f"cpu:{count}")
        with pytest.raises(BudgetError) as caught:
            placed(costs, machine, 1, placement)
        found.append(activations(placed(costs, machine, caught.value.minimum_bytes, placement)))
    assert found[1] < 0.75 * found[0]
    assert found[2] < 0.75 * found[1]


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_of_one_stage_have_a_least_budget(lanes: int) -> None:
    costs, machine = regular_stack(4096, 128, 14), parse_machine(f"cpu:{lanes}")
    with pytest.raises(BudgetError) as caught:
        placed(costs, machine, 1, "grid", (1, lanes))
    least = caught.value.minimum_bytes
    for budget in (least, 2 * least):
        placed(costs, machine, budget, "grid", (1, lanes))


@pytest.mark.parametrize("placement", ["layers", "time", "grid"])
def test_the_gap_of_a_long_regular_stack_is_small(placement: str) -> None:
    plan = placed(regular_stack(131072, 512, 22), parse_machine("cpu:4"), 200_000_000, placement)
    assert plan.gap < 0.05


def test_layers_apart_that_share_parameters_add_their_gradients_up() -> None:
    costs = replace(regular_stack(4096, 256, 6), ties=(Tie((0, 7), 4000),))
    apart = placed(costs, parse_machine("cpu:2"), GIB, "layers")
    assert sum(isinstance(action, SumTied) for action in apart.actions) == 2
    together = placed(costs, parse_machine("cpu:2"), GIB, "time")
    assert not any(isinstance(action, SumTied) for action in together.actions)


def test_in_the_layers_placement_only_residual_chunks_and_cotangents_travel() -> None:
    plan = placed(regular_stack(4096, 256, 6), parse_machine("cpu:2"), GIB, "layers")
    assert {action.value.kind.value for action in plan.actions if isinstance(action, Send)} == {"x", "g"}


def test_in_the_time_placement_only_states_and_their_adjoints_travel() -> None:
    plan = placed(regular_stack(4096, 256, 6), parse_machine("cpu:2"), GIB, "time")
    assert {action.value.kind.value for action in plan.actions if isinstance(action, Send)} == {"s", "lam"}


def test_a_layer_that_fits_on_no_device_is_named_with_its_bytes_and_the_largest_device() -> None:
    costs, machine = regular_stack(4096, 256, 4), parse_machine("a100-40gb:2")
    residency = layered_residency(costs)
    huge = (*residency.layers[3], Item("huge", "parameters", 60 * GIB, False))
    forms = [(lambda chunk: costs, Residency((*residency.layers[:3], huge, *residency.layers[4:])))]
    with pytest.raises(BudgetError, match=r"layer layers\.2, which alone holds 60.* \(the largest device has 39\.5"):
        solve_machine(
            forms, machine=machine, seq_len=4096, budget_bytes=39 * GIB, candidates=[256], options=Options(placement="layers")
        )


def test_without_time_to_search_a_placement_says_so() -> None:
    costs = regular_stack(4096, 256, 6)
    plan = solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=parse_machine("cpu:2"),
        seq_len=4096,
        budget_bytes=GIB,
        candidates=[256],
        options=Options(solver_time_limit_seconds=0),
    )
    plan.verify()
    assert plan.status == "heuristic"


def test_the_printed_plan_says_where_everything_is() -> None:
    plan = placed(regular_stack(4096, 256, 6), parse_machine("cpu:2"), GIB, "layers")
    text = str(plan)
    assert "Placement" in text
    assert "cpu:0          0-" in text


@pytest.mark.slow
def test_a_hybrid_of_64_layers_on_8_unequal_devices_plans_near_its_bound() -> None:
    assert placed(hybrid_stack(), eight_unequal_devices(), 4 * GIB, None).gap < 0.03
