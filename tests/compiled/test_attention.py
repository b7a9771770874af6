"""Hybrid stacks: attention beside recurrences trains like plain autograd, however time is cut and whatever the budget."""

from __future__ import annotations

from collections.abc import Iterator

import fidelity
import pytest
import torch
from attending import Attention, hybrid
from fidelity import Residual, compare, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import adjcomp
from adjcomp.ir.actions import Adjoint, Advance, Forward, Recompute


def _cotangent(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 40), st.integers(3, 40), st.integers(1, 2), st.sampled_from([(4, 4), (4, 2), (2, 1)]), st.floats(1.0, 2.0))
def test_any_length_chunk_batch_and_budget(length: int, chunk: int, batch: int, heads: tuple[int, int], share: float) -> None:
    model, ids, dy = hybrid(8, *heads), tokens(batch, length, vocab=31), _cotangent(batch, length)

    def call(module: nn.Module) -> Tensor:
        return (module(ids) * dy).sum()

    budget = int(fidelity.tightest(model, call, chunk) * share)
    view = adjcomp.compile(model, mem_budget=budget, chunk=chunk)
    compare(model, view, call, bound=1e-10)
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes <= budget
    view.plan.verify()


@pytest.mark.slow
def test_borders_that_are_dropped_are_made_again_beside_the_keys() -> None:
    """Given many chunks in little memory, when chunks are run again from an earlier border, then gradients stay exact."""
    model, ids = hybrid(), tokens(1, 40, vocab=31)

    def call(module: nn.Module) -> Tensor:
        return module(ids).pow(2).sum()

    view = adjcomp.compile(model, mem_budget=fidelity.tightest(model, call, 2), chunk=2)
    compare(model, view, call, bound=1e-10)
    assert any(isinstance(action, Advance | Recompute) for action in view.plan.actions)


def test_keys_and_values_are_counted_by_their_own_name() -> None:
    model = hybrid(8, 4, 2)
    plan = adjcomp.compile(model, chunk=16).plan_for(batch_size=1, seq_len=64)
    token_bytes = 2 * 2 * (2 * 2) * 8  # layers, keys and values, heads by width, float64
    assert plan.costs.resident_bytes["keys and values"] == 64 * token_bytes
    assert plan.costs.turn_bytes["cotangents of keys and values"] == 64 * token_bytes
    assert "keys and values" in str(plan)
    assert "causal_attention" in str(adjcomp.explain(model, (tokens(1, 64, vocab=31),)))


@pytest.mark.slow
def test_frozen_layers_take_no_cotangents_of_keys() -> None:
    model, ids = hybrid(), tokens(2, 20, vocab=31)
    for module in (model.embed, *model.layers[:1]):
        module.requires_grad_(False)
    view = adjcomp.compile(model, chunk=6)
    compare(model, view, lambda m: m(ids).pow(2).sum(), bound=1e-10)
    costs = view.plan.costs
    assert costs.turn_bytes["cotangents of keys and values"] * 2 == costs.resident_bytes["keys and values"]


def test_low_precision_keeps_sums_wide() -> None:
    """Given bfloat16, when cotangents come back from many chunks, then the error is that of plain autograd."""
    model, ids = hybrid(16).bfloat16(), tokens(2, 64, vocab=31)
    exact = hybrid(16)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(q)

    def call(module: nn.Module) -> Tensor:
        return module(ids).double().pow(2).sum()

    want = fidelity.measure(exact, lambda: call(exact))
    plain = fidelity.measure(model, lambda: call(model))
    got = fidelity.measure(model, lambda: call(adjcomp.compile(model, chunk=4)))
    assert _far(got, want) <= 1.5 * _far(plain, want)


def _far(found: fidelity.Gradients, want: fidelity.Gradients) -> float:
    pairs = [(found.grads[name], g) for name, g in want.grads.items() if g is not None]
    return sum(float((f.double() - g).norm() ** 2) for f, g in pairs if f is not None) ** 0.5


@pytest.mark.slow
def test_evaluation_reads_the_same_keys() -> None:
    model, ids = hybrid(), tokens(2, 33, vocab=31)
    with torch.no_grad():
        expected = model(ids)
        found = adjcomp.compile(model.eval(), chunk=5)(ids)
    assert torch.allclose(found, expected, atol=1e-12)


def _swapped(plan: adjcomp.Plan, kind: type) -> Iterator[object]:
    """The actions with the first two of a kind on an attention layer in the other order."""
    at = [i for i, a in enumerate(plan.actions) if type(a) is kind and a.layer == 2][:2]
    order = list(plan.actions)
    order[at[0]], order[at[1]] = order[at[1]], order[at[0]]
    yield from order


@pytest.mark.parametrize("kind", [Forward, Adjoint])
def test_the_verifier_refuses_chunks_out_of_order(kind: type) -> None:
    """Given a stack without any state, when chunks of its attention change places, then the plan is refused."""
    from dataclasses import replace

    torch.manual_seed(0)
    model = Residual([nn.Identity(), Attention(8, 2, 1), Attention(8, 2, 1)], 8)
    plan = adjcomp.compile(model, chunk=8).plan_for(batch_size=1, seq_len=16)
    tile = next(k for k, t in enumerate(plan.costs.layers) if t.reads_past)
    assert tile in (1, 2)
    with pytest.raises(ValueError, match="attends over time"):
        replace(plan, actions=tuple(_swapped(plan, kind))).verify()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::adjcomp.ApproximationWarning")
def test_residual_coupling_cuts_between_layers_and_not_along_time() -> None:
    """Given coupling='residual', when the same is written with detached inputs, then gradients agree."""
    model, ids = hybrid(), tokens(1, 24, vocab=31)

    def detached(module: Residual) -> Tensor:
        x = module.embed(ids)
        for layer in module.layers:
            x = x + layer(x.detach()) - x.detach()
        return module.head(x).pow(2).sum()

    want = fidelity.measure(model, lambda: detached(model))
    view = adjcomp.compile(model, chunk=5, coupling="residual")
    got = fidelity.measure(model, lambda: view(ids).pow(2).sum())
    assert fidelity.distance(got, want) <= 1e-10
