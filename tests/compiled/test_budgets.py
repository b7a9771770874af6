"""What is measured is what was predicted, and neither passes the budget."""

from __future__ import annotations

import fidelity
import pytest
import torch

import adjcomp


def _minimum(model: torch.nn.Module, length: int) -> int:
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.compile(model, mem_budget="1KiB").plan_for(batch_size=1, seq_len=length)
    return caught.value.minimum_bytes


@pytest.mark.parametrize("share", [1.0, 1.3, 3.0])
@pytest.mark.parametrize("family", list(fidelity.FAMILIES))
def test_predicted_is_measured_to_the_byte(family: str, share: float) -> None:
    """Given a budget from the minimum up, when a step runs, then the tracked peak is the plan's and within the budget."""
    model = fidelity.FAMILIES[family]()
    budget = int(_minimum(model, 96) * share)
    view = adjcomp.compile(model, mem_budget=budget)
    ids = fidelity.tokens(1, 96)
    view(input_ids=ids, labels=ids).loss.backward()
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes <= budget
    view.plan.verify()


def test_a_longer_sequence_costs_borders_and_inputs_only() -> None:
    """Given a fixed chunk, when the sequence is four times as long, then the minimum grows by borders and inputs only."""
    model = fidelity.mamba()
    plans = [adjcomp.plan(model, None, seq_len=length, chunk=64) for length in (4096, 16384)]
    minima = []
    for length in (4096, 16384):
        with pytest.raises(adjcomp.BudgetError) as caught:
            adjcomp.plan(model, 1, seq_len=length, chunk=64)
        minima.append(caught.value.minimum_bytes)
    tile = plans[0].costs.layers
    border = sum(t.carry_bytes for t in tile) * (16384 - 4096) // 64
    inputs = 3 * 8 * (16384 - 4096)
    assert minima[1] - minima[0] <= 1.1 * (border + inputs)


def test_optimizer_state_counts_before_it_exists() -> None:
    """Given an optimizer that has not stepped, when its budget is planned, then two float32 states a parameter are counted."""
    model = fidelity.mamba()
    optimizer = torch.optim.AdamW(model.parameters())
    view = adjcomp.compile(model, optimizer=optimizer)
    plan = view.plan_for(batch_size=1, seq_len=32)
    trained = sum(p.numel() for p in model.parameters())
    assert plan.costs.resident_bytes["optimizer"] >= 8 * trained
    ids = fidelity.tokens(1, 32)
    for _ in range(2):
        view(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert view.stats.measured_peak_bytes <= view.stats.predicted_peak_bytes


def test_a_saved_plan_runs_and_one_for_another_model_is_refused() -> None:
    """Given a plan saved as JSON, when it is given to compile, then that plan runs; another model's is refused by name."""
    model, ids = fidelity.mamba(), fidelity.tokens(1, 64)
    plan = adjcomp.compile(model, chunk=16).plan_for(batch_size=1, seq_len=64)
    saved = adjcomp.Plan.from_json(plan.to_json())
    view = adjcomp.compile(model, plan=saved)
    view(input_ids=ids, labels=ids).loss.backward()
    assert view.plan.to_json() == plan.to_json()
    with pytest.raises(ValueError, match="doesn't fit the model"):
        adjcomp.compile(fidelity.mamba(state_size=16), plan=saved)(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="for 64 tokens"):
        view(input_ids=ids[:, :32], labels=ids[:, :32])
