"""Sequences in one chunk: the gradients of a layer are handed out before those of the layers below exist."""

from __future__ import annotations

import fidelity
import pytest
import torch

import adjcomp

LENGTH = 24


def _minimum(model: torch.nn.Module, chunk: int) -> int:
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.compile(model, mem_budget="1KiB", chunk=chunk).plan_for(batch_size=1, seq_len=LENGTH)
    return caught.value.minimum_bytes


def test_a_short_sequence_in_lower_precision_needs_no_accumulators_of_all_layers() -> None:
    """Given bfloat16 parameters that outweigh a short sequence, when run at the minimum, then it is measured as predicted, and
    less than parameters, their gradients and all accumulators together."""
    model = fidelity.mamba(hidden_size=64).to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    budget, ids = _minimum(model, LENGTH), fidelity.tokens(1, LENGTH)
    view = adjcomp.compile(model, mem_budget=budget, chunk=LENGTH)
    view(input_ids=ids, labels=ids).loss.backward()
    assert view.plan.costs.chunk_count == 1
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes <= budget
    assert budget < 2 * parameters + 4 * parameters
    assert all(p.grad is not None and p.grad.dtype is torch.bfloat16 for p in model.parameters())


@pytest.mark.slow
def test_gradients_are_those_of_any_other_plan() -> None:
    """Given micro-batches that add to gradients, when run in one chunk and in several, then both are plain autograd's."""
    model = fidelity.mamba2()
    ids = [fidelity.tokens(2, LENGTH, seed) for seed in (3, 4)]

    def run(call: torch.nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        for batch in ids:
            call(input_ids=batch, labels=batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = run(model)
    total = torch.stack([g.norm() for g in plain.values()]).norm()
    for chunk in (LENGTH, 7):
        found = run(adjcomp.compile(model, mem_budget="64MiB", chunk=chunk))
        assert found.keys() == plain.keys()
        for name, grad in plain.items():
            assert (found[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-8 * total, name
