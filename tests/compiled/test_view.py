"""The compiled view is the model its user knows."""

from __future__ import annotations

import inspect
import pickle

import fidelity
import pytest
import torch

import adjcomp


def test_the_view_shares_everything_with_the_model() -> None:
    """Given a compiled model, then class, state, training flag, signature and repr are the model's own."""
    model = fidelity.mamba()
    view = adjcomp.compile(model)
    assert isinstance(view, type(model))
    assert list(view.state_dict()) == list(model.state_dict())
    assert inspect.signature(view.forward) == inspect.signature(model.forward)
    view.eval()
    assert not model.training
    model.train()
    assert view.training
    assert [id(p) for p in view.parameters()] == [id(p) for p in model.parameters()]


def test_the_original_stays_plain() -> None:
    """Given a compiled model, when the original is called, then it runs its own forward with logits."""
    model = fidelity.mamba()
    adjcomp.compile(model)
    ids = fidelity.tokens(1, 8)
    assert model(input_ids=ids, labels=ids).logits is not None


def test_plain_weights_can_be_saved_and_loaded_through_the_view() -> None:
    """Given a view, when its state_dict goes through pickle and back, then the model holds the loaded values."""
    model = fidelity.mamba()
    view = adjcomp.compile(model)
    saved = pickle.loads(pickle.dumps(view.state_dict()))
    with torch.no_grad():
        next(model.parameters()).zero_()
    view.load_state_dict(saved)
    assert next(model.parameters()).abs().sum() > 0


@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "8"])
def test_a_chunk_must_be_a_positive_number(bad: object) -> None:
    """Given a chunk length that is none, then compile says so at once."""
    with pytest.raises(ValueError, match="chunk must be a positive number"):
        adjcomp.compile(fidelity.mamba(), chunk=bad)


def test_only_modules_compile() -> None:
    """Given a function, then compile names what it wants."""
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        adjcomp.compile(lambda x: x)


def test_a_budget_above_the_device_is_refused() -> None:
    """Given an absurd budget, then the device's own size is named."""
    with pytest.raises(ValueError, match="more than cpu has"):
        adjcomp.compile(fidelity.mamba(), mem_budget="4EiB")
