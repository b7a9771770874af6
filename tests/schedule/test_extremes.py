"""Sizes at the ends of what can be asked for."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
from synthetic import regular_stack

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import Plan, Status
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule import chunk_lengths


def scaled(costs: StackCosts, factor: int) -> StackCosts:
    """All bytes `factor` times as large."""

    def tile(t: TileCost) -> TileCost:
        return replace(t, **{name: getattr(t, name) * factor for name in TileCost.__annotations__ if name.endswith("_bytes")})

    return replace(
        costs,
        layers=tuple(map(tile, costs.layers)),
        last_layers=tuple(map(tile, costs.last_layers)),
        resident_bytes={kind: size * factor for kind, size in costs.resident_bytes.items()},
        turn_bytes={kind: size * factor for kind, size in costs.turn_bytes.items()},
    )


def huge_tiles() -> StackCosts:
    """64 layers and 64 chunks whose tiles keep 2**33 bytes and more."""
    costs = scaled(regular_stack(64 * 64, 64, 64), 1 << 15)
    assert costs.layers[1].keep_bytes >= 1 << 32
    return costs


@pytest.mark.parametrize("budget", [1 << 43, 1 << 50, 1 << 60, 1 << 62])
def test_byte_sizes_that_overflow_a_naive_model_still_plan(plan_for: Callable[..., Plan], budget: int) -> None:
    """Given tiles of gibibytes and budgets up to 2**62, then the plan is valid, and keeps everything where it may."""
    costs = huge_tiles()
    plan = plan_for(lambda _: costs, budget, [64])
    plan.verify()
    assert plan.peak_bytes["cpu"] <= budget
    if budget >= 1 << 50:
        assert plan.actions == emit(costs, [ColumnMode(costs.head + 1)] * costs.chunk_count)
        assert plan.status is Status.OPTIMAL


def test_bytes_beyond_every_machine_are_refused_by_name(plan_for: Callable[..., Plan]) -> None:
    costs = scaled(regular_stack(256, 16, 2), 1 << 45)
    with pytest.raises(ValueError, match="more than any machine holds"):
        plan_for(lambda _: costs, 1 << 60, [16])


@pytest.mark.parametrize(("seq_len", "candidates"), [(1, [1]), (1, [64, 128]), (7, [3]), (8, [8]), (9, [8])])
def test_short_sequences_plan(plan_for: Callable[..., Plan], seq_len: int, candidates: list[int]) -> None:
    plan = plan_for(lambda chunk: regular_stack(seq_len, chunk, 2), 1 << 30, candidates)
    plan.verify()
    assert plan.chunk == min(candidates[0], seq_len)


@pytest.mark.parametrize("candidates", [[], [0], [-4, 8]])
def test_chunk_lengths_must_be_there_and_positive(plan_for: Callable[..., Plan], candidates: list[int]) -> None:
    from adjcomp.options import Options
    from adjcomp.passes.schedule import solve

    with pytest.raises(ValueError, match="chunk lengths"):
        solve(
            lambda c: regular_stack(64, c, 2), seq_len=64, budget_bytes=1, candidates=candidates, device="cpu", options=Options()
        )


def test_a_stack_without_gradients_has_nothing_to_plan(plan_for: Callable[..., Plan]) -> None:
    costs = regular_stack(64, 16, 2)
    frozen = replace(
        costs,
        layers=tuple(replace(t, has_vjp=False, passes_cotangent=False) for t in costs.layers),
        last_layers=tuple(replace(t, has_vjp=False, passes_cotangent=False) for t in costs.last_layers),
    )
    with pytest.raises(ValueError, match="nothing in this model takes a gradient"):
        plan_for(lambda _: frozen, 1 << 30, [16])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_no_times_are_refused(plan_for: Callable[..., Plan], wrong: float) -> None:
    costs = regular_stack(64, 16, 2)
    broken = replace(costs, layers=(costs.layers[0], replace(costs.layers[1], adjoint_seconds=wrong), *costs.layers[2:]))
    with pytest.raises(ValueError, match="seconds"):
        plan_for(lambda _: broken, 1 << 30, [16])


def test_long_stacks_of_many_chunks_plan_within_one_percent(plan_for: Callable[..., Plan]) -> None:
    """Given 48 layers and 512 chunks, when the budget is in the middle, then the certified gap is small."""
    costs = {chunk: regular_stack(1 << 17, chunk, 48, width=32) for chunk in (256, 512)}
    plan = plan_for(costs.__getitem__, 120_000_000, [256, 512])
    assert plan.gap <= 0.01
    assert len(plan.actions) > 20_000


@pytest.mark.parametrize("count", [1 << 13, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_very_many_chunks_plan_within_one_percent(plan_for: Callable[..., Plan], count: int) -> None:
    costs = regular_stack(count, 1, 1, width=4, state=16)
    plan = plan_for(lambda _: costs, 150 * count, [1])
    assert costs.chunk_count == count
    assert plan.gap <= 0.01


def test_without_ortools_there_is_a_constructive_plan_and_a_warning(
    plan_for: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_find, real_import = importlib.util.find_spec, builtins.__import__

    def find(name: str, package: str | None = None) -> object:
        return None if name.startswith("ortools") else real_find(name, package)

    def load(name: str, *rest: object) -> ModuleType:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(builtins, "__import__", load)
    with pytest.warns(RuntimeWarning, match="OR-Tools is not installed"):
        plan = plan_for(lambda chunk: regular_stack(2048, chunk, 6), 7_500_000, [64, 128])
    plan.verify()
    assert plan.status is Status.HEURISTIC


@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 1000, 65_536, 1_048_576, 16_777_216])
def test_the_lengths_to_consider_reach_from_many_chunks_to_one(seq_len: int) -> None:
    lengths = chunk_lengths(seq_len)
    assert lengths[-1] == seq_len
    assert seq_len / lengths[0] <= 2048
    assert all(later <= 1.5 * earlier + 1 for earlier, later in itertools.pairwise(lengths))
    assert len(lengths) <= 40
