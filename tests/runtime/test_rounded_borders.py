"""Steps whose borders are kept in bfloat16: less memory, gradients that are close, and a word about it."""

from __future__ import annotations

import fidelity
import pytest
import torch

import adjcomp
from adjcomp.ir.narrow import Narrow
from adjcomp.variants import ApproximationWarning

OPTIONS = adjcomp.Options(border_dtype="bfloat16")


@pytest.mark.filterwarnings("ignore::adjcomp.variants.ApproximationWarning")
def test_gradients_from_rounded_borders_are_close_and_take_what_is_predicted() -> None:
    """Given a budget where rounding pays, when a step runs, then the loss is the same and gradients differ by thousandths."""
    model, ids = fidelity.mamba(state_size=64, num_hidden_layers=2), fidelity.tokens(2, 256)
    exact = adjcomp.compile(model, chunk=16)
    expected = exact(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    flat = adjcomp.plan(model, None, batch_size=2, seq_len=256, chunk=16)
    budget = sum(flat.costs.resident_bytes.values()) + sum(flat.costs.turn_bytes.values()) + 1_100_000
    model.zero_grad()
    view = adjcomp.compile(model, budget, chunk=16, options=OPTIONS)
    loss = view(input_ids=ids, labels=ids).loss
    loss.backward()
    assert any(isinstance(a, Narrow) for a in view.plan.actions)
    assert "AN APPROXIMATION" in str(view.plan)
    assert torch.equal(loss, expected)
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes <= budget
    off = [(p.grad - gradients[name]).norm() / gradients[name].norm() for name, p in model.named_parameters()]
    assert 0 < max(off) < 0.02


def test_rounding_is_asked_for_by_name_and_warned_of() -> None:
    model = fidelity.mamba(num_hidden_layers=1)
    adjcomp.variants._WARNED.clear()
    with pytest.warns(ApproximationWarning, match="rounded to bfloat16"):
        adjcomp.compile(model, options=OPTIONS)
    with pytest.raises(ValueError, match="border_dtype must be None or 'bfloat16'"):
        adjcomp.Options(border_dtype="float16")
    with pytest.raises(ValueError, match="has several"):
        adjcomp.plan(model, None, seq_len=64, machine="a100-40gb:2", options=OPTIONS)
