"""Heads that leave their internals in the forward although their input is dropped: their products run once less."""

from __future__ import annotations

import fidelity
import pytest
import torch

import adjcomp
from adjcomp.ir.actions import Recompute
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import Plan
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule.search import build_plan
from adjcomp.shorter import column_modes
from adjcomp.stepping import Stats


def gradients(model: torch.nn.Module, plan: Plan, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], Stats]:
    """Gradients of one step under a plan, and its figures."""
    model.zero_grad(set_to_none=True)
    view = adjcomp.compile(model, plan=plan)
    view(input_ids=ids, labels=ids.clone()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, view.stats


@pytest.mark.parametrize("again", [frozenset(), frozenset({1}), frozenset({2})])
def test_gradients_are_the_same_bits_and_the_head_runs_once(again: frozenset[int]) -> None:
    """Given plans that hold nothing, when heads leave their internals, then gradients stay and no head is recomputed."""
    model, ids = fidelity.mamba(num_hidden_layers=2), fidelity.tokens(2, 100)
    costs = adjcomp.plan(model, None, batch_size=2, seq_len=100, chunk=16).costs
    plain, noted = [ColumnMode(0, again)] * costs.chunk_count, [ColumnMode(0, again, noted=True)] * costs.chunk_count
    before, after = (build_plan(costs, emit(costs, modes), 1 << 34, "cpu") for modes in (plain, noted))
    after.verify()
    assert column_modes(before) == plain
    assert column_modes(after) == noted
    assert not any(isinstance(a, Recompute) and a.layer == costs.head for a in after.actions)
    assert after.seconds < before.seconds
    expected, _ = gradients(model, before, ids)
    found, stats = gradients(model, Plan.from_json(after.to_json()), ids)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert stats.measured_peak_bytes == stats.predicted_peak_bytes


def test_the_planner_keeps_heads_internals_where_their_inputs_have_no_room() -> None:
    """Given a wide vocabulary, when hardly any input of a head can stay, then most heads leave their internals all the same."""
    model = fidelity.mamba(num_hidden_layers=2, vocab_size=4000)
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.plan(model, 1, seq_len=2048, chunk=64)
    plan = adjcomp.plan(model, caught.value.minimum_bytes + 400_000, seq_len=2048, chunk=64)
    plan.verify()
    assert sum(mode.noted for mode in column_modes(plan)) > plan.costs.chunk_count // 2
