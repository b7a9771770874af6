"""A stream longer than memory, piece by piece: exact, truncated, without gradients, and on into generation."""

from __future__ import annotations

import fidelity
import pytest
import torch
from fidelity import Gradients, distance, measure
from torch import Tensor, nn

import adjcomp

IDS = fidelity.tokens(2, 24)
SIZES = (9, 1, 14)


def next_labels(ids: Tensor) -> Tensor:
    """The token after each, over borders of pieces, too."""
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)


def stream_loss(compiled: nn.Module, *, detach: bool, start: adjcomp.State | None = None) -> Tensor:
    """The summed loss of all pieces of IDS."""
    state, total = start, torch.zeros(())
    for ids, labels in zip(IDS.split(SIZES, 1), next_labels(IDS).split(SIZES, 1), strict=True):
        given = {"shift_labels": labels, "num_items_in_batch": 1, "initial_state": state}
        output, state = compiled(input_ids=ids, labels=ids, **given)
        state = state.detach() if detach else state
        total = total + output.loss
    return total


def whole(model: nn.Module) -> Gradients:
    return measure(model, lambda: model(input_ids=IDS, labels=IDS, shift_labels=next_labels(IDS), num_items_in_batch=1).loss)


@pytest.mark.parametrize("family", fidelity.FAMILIES)
def test_pieces_equal_the_whole_stream(family: str) -> None:
    """Given a state handed from piece to piece, when one backward runs over all, then gradients are those of the whole."""
    model = fidelity.FAMILIES[family](num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=5)
    assert distance(measure(model, lambda: stream_loss(compiled, detach=False)), whole(model)) <= 1e-5
    if family == "mamba":
        truncated = measure(model, lambda: stream_loss(compiled, detach=True))
        assert distance(truncated, whole(model)) > 1e-3
        torch.testing.assert_close(truncated.loss, whole(model).loss)


def test_truncated_pieces_run_their_backward_one_by_one() -> None:
    """Given detached states, when each piece runs its own backward, then gradients are those of one backward over all."""
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=5)
    together = measure(model, lambda: stream_loss(compiled, detach=True))
    state = None
    for ids, labels in zip(IDS.split(SIZES, 1), next_labels(IDS).split(SIZES, 1), strict=True):
        output, state = compiled(
            input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=1, initial_state=state and state.detach()
        )
        output.loss.backward()
    apart = {name: None if p.grad is None else p.grad for name, p in model.named_parameters()}
    assert distance(Gradients(together.loss, apart), together) <= 1e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_a_given_state_gets_its_gradient(frozen: bool) -> None:
    """Given a state that requires grad, when a loss reads what follows, then it gets a gradient, through frozen layers, too."""
    model = fidelity.diagonal_stack(layers=2).double()
    model.embed.requires_grad_(not frozen)
    model.layers[0].requires_grad_(not frozen)
    ids = fidelity.tokens(2, 14, vocab=31)
    compiled = adjcomp.compile(model, chunk=4)
    with torch.no_grad():
        _, state = compiled(ids[:, :6], initial_state=None)
    state.requires_grad_()

    def plain(first: Tensor, second: Tensor) -> Tensor:
        """The rest by hand: the state of a diagonal layer is the h that its scan starts from."""
        x = model.embed(ids[:, 6:])
        for layer, start in zip(model.layers, (first, second), strict=True):
            mixer, u = layer.mixer, layer.norm(x)
            driven = u.unsqueeze(-1) * mixer.inputs
            h, _ = adjcomp.ops.linear_scan(torch.sigmoid(mixer.decay).expand_as(driven), driven, start)
            x = x + mixer.project((h * mixer.outputs).sum(-1))
        return model.head(x).square().mean()

    output, last = compiled(ids[:, 6:], initial_state=state)
    got = torch.autograd.grad(output.square().mean(), list(state))
    want = torch.autograd.grad(plain(*(t.view_as(t) for t in state)), list(state))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    assert all(t.requires_grad for t in last)


def test_a_state_of_another_batch_or_model_is_refused() -> None:
    """Given a state that doesn't fit, when it is passed, then the error names the layer or says where it comes from."""
    model = fidelity.mamba(num_hidden_layers=1)
    compiled = adjcomp.compile(model)
    _, state = compiled(input_ids=IDS, labels=IDS, initial_state=None)
    with pytest.raises(ValueError, match=r"initial_state of backbone\.layers\.0.* is \(2, 3, 64\)"):
        compiled(input_ids=IDS[:1], labels=IDS[:1], initial_state=state)
    with pytest.raises(ValueError, match="another model"):
        adjcomp.compile(fidelity.mamba(num_hidden_layers=2))(input_ids=IDS, labels=IDS, initial_state=state)
    with pytest.raises(TypeError, match="not list"):
        compiled(input_ids=IDS, labels=IDS, initial_state=[])


def test_states_count_in_the_budget() -> None:
    """Given a piece, when it runs, then the states that enter and leave are in the predicted peak."""
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=8)
    _, state = compiled(input_ids=IDS, labels=IDS, initial_state=None)
    output, _ = compiled(input_ids=IDS, labels=IDS, initial_state=state.detach())
    output.loss.backward()
    assert compiled.stats.measured_peak_bytes <= compiled.stats.predicted_peak_bytes


@pytest.mark.parametrize("family", fidelity.FAMILIES)
def test_a_long_prefill_feeds_generate(family: str) -> None:
    """Given a cache from a prefill by chunks, when the model generates, then it writes what it writes after its own prefill; and
    the model's own cache is a state to go on from.
    """
    model = fidelity.FAMILIES[family](num_hidden_layers=2).eval()
    compiled = adjcomp.compile(model, chunk=7)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    want = model.generate(IDS, **options)
    assert torch.equal(compiled.generate(IDS, cache=compiled.prefill(IDS[:, :-1]), **options), want)
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :10], use_cache=True).cache
        output, _ = compiled(input_ids=IDS[:, 10:], initial_state=cache)
        torch.testing.assert_close(output.logits, model(input_ids=IDS).logits[:, 10:], rtol=1e-5, atol=1e-5)


def test_a_model_without_a_cache_says_so() -> None:
    """Given a stack of one's own, when a cache is asked for, then the error names the class."""
    compiled = adjcomp.compile(fidelity.diagonal_stack())
    with pytest.raises(TypeError, match="Residual takes no use_cache"):
        compiled.prefill(IDS)
