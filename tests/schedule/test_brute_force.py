"""The planner against every plan there is, on tiny instances."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from segmented import every_segmentation
from synthetic import random_stack, with_gradients

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.plan import Share
from adjcomp.options import Options
from adjcomp.passes.emit import emit
from adjcomp.passes.layermajor import emit_layer_major
from adjcomp.passes.nesting import Run, emit_nested
from adjcomp.passes.schedule import solve
from adjcomp.passes.schedule.instance import build_instance
from adjcomp.passes.schedule.layered import is_possible
from adjcomp.passes.schedule.needs import nested_minimum
from adjcomp.passes.simulate import simulate


def column_modes(costs: StackCosts) -> Iterator[ColumnMode]:
    """Every mode of a column."""
    bottom = bottom_layer(costs)
    for held in range(costs.head + 2 - bottom):
        below = range(bottom, costs.head - held)
        for size in range(len(below) + 1):
            for again in itertools.combinations(below, size):
                yield ColumnMode(held, frozenset(again))
                if held == 0 and costs.tile(costs.head, 0).reads_input:
                    yield ColumnMode(held, frozenset(again), noted=True)


def every_nesting(start: int, count: int, whole: bool) -> Iterator[tuple[Run, ...]]:
    """Every way to reverse `count` chunks from `start`, whose border is stored; the first forward (`whole`) needs no advance."""
    if count == 1:
        yield (Run(start, start),)
    for j in range(1, count):
        move = () if whole else (Run(start, start + j),)
        for behind in every_nesting(start + j, count - j, whole):
            for before in every_nesting(start, j, False):
                yield (*move, *behind, *before)


def every_nested_plan(costs: StackCosts) -> list[tuple[int, float]]:
    """(peak, seconds) of every nested plan."""
    share = Share("cpu", 0, costs.resident_bytes, costs.turn_bytes)
    lean = [mode for mode in column_modes(costs) if mode.held == 0 and not mode.noted]
    found = []
    for modes in itertools.product(*[lean] * (costs.chunk_count - 1), list(column_modes(costs))):
        for runs in every_nesting(0, costs.chunk_count, True):
            totals = simulate(costs, (share,), emit_nested(costs, modes, runs))
            found.append((totals.peak_bytes["cpu"], totals.seconds))
    return found


def every_plan(costs: StackCosts) -> list[tuple[int, float]]:
    """(peak, seconds) of every plan of the space, by emitting and simulating it."""
    share = Share("cpu", 0, costs.resident_bytes, costs.turn_bytes)
    found = []
    for modes in itertools.product(list(column_modes(costs)), repeat=costs.chunk_count):
        totals = simulate(costs, (share,), emit(costs, modes))
        found.append((totals.peak_bytes["cpu"], totals.seconds))
    return found


def every_layered_plan(costs: StackCosts) -> list[tuple[int, float]]:
    """(peak, seconds) of every layer-major plan, where there are any."""
    share = Share("cpu", 0, costs.resident_bytes, costs.turn_bytes)
    made = every_segmentation(costs) if is_possible(costs) else ()
    totals = [simulate(costs, (share,), emit_layer_major(costs, segments)) for segments in made]
    return [(each.peak_bytes["cpu"], each.seconds) for each in totals]


# Hundreds of instances in all: a good number of the quickest by default, the rest with -m slow.
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 400))]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_and_none_fits_a_budget_called_too_small(seed: int) -> None:
    """Given a tiny stack, when planned at every interesting budget, then the plan is the best one and the bound is below it."""
    layers, chunks = ([(1, 3), (2, 2), (3, 1), (2, 1)] if seed < 48 else [(1, 4), (2, 3), (3, 2), (3, 1), (1, 3)])[
        seed % (4 if seed < 48 else 5)
    ]
    costs = random_stack(seed, layers=layers, chunks=chunks)
    costs = with_gradients(costs, seed) if seed % 3 else costs
    plans = every_plan(costs)
    share = Share("cpu", 0, costs.resident_bytes, costs.turn_bytes)
    nested_from = nested_minimum(build_instance(costs, share))
    plans += every_layered_plan(costs)
    smallest = min(nested_from, *(peak for peak, _ in plans))
    if nested_from < 1 << 40:
        nested = every_nested_plan(costs)
        assert min(peak for peak, _ in nested) <= nested_from
        plans += [(max(peak, nested_from), seconds) for peak, seconds in nested]
    levels = sorted({peak for peak, _ in plans})
    with pytest.raises(BudgetError) as caught:
        solve(lambda _: costs, seq_len=costs.seq_len, budget_bytes=smallest - 1, candidates=[4], device="cpu", options=Options())
    assert caught.value.minimum_bytes == smallest
    assert sum(caught.value.contributors.values()) == smallest
    for budget in sorted({levels[0], levels[len(levels) // 3], levels[len(levels) // 2], levels[-1]}):
        best = min(seconds for peak, seconds in plans if peak <= budget)
        plan = solve(lambda _: costs, seq_len=costs.seq_len, budget_bytes=budget, candidates=[4], device="cpu", options=Options())
        plan.verify()
        assert plan.seconds == pytest.approx(best, rel=1e-9)
        assert plan.lower_bound_seconds <= best * (1 + 1e-12)
        assert plan.status == "optimal"
