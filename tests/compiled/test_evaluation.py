"""Without gradients: losses of any length, and never a value of (T, vocabulary)."""

from __future__ import annotations

import fidelity
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adjcomp


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *made])
        return result


class Scored(nn.Module):
    """Functions of the logits that are pointwise in time: log-likelihood of a target, and whether it is the likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.model = fidelity.diagonal_stack(layers=2)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids)
        chosen = functional.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return chosen, logits.argmax(-1) == targets


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loss_without_gradients_never_holds_all_logits(mode: type) -> None:
    """Given labels and no gradients, when a long row is evaluated, then the loss is plain's, logits are None, and no tensor is as
    large as they would be.
    """
    model = fidelity.mamba(num_hidden_layers=2, vocab_size=512).eval()
    compiled = adjcomp.compile(model, chunk=32)
    ids = fidelity.tokens(1, 256, vocab=512)
    with mode():
        compiled(input_ids=ids, labels=ids)
        with Largest() as largest:
            output = compiled(input_ids=ids, labels=ids)
        want = model(input_ids=ids, labels=ids).loss
    assert output.logits is None
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, want, rtol=1e-6, atol=1e-6)
    assert largest.elements < 256 * 512 // 2
    assert compiled.stats.measured_peak_bytes <= compiled.stats.predicted_peak_bytes


def test_evaluation_fits_where_training_does_not() -> None:
    """Given a budget below the minimum of training, when a loss is evaluated, then it runs; below its own minimum it says so."""
    model = fidelity.mamba()
    ids = fidelity.tokens(1, 512)
    smallest = fidelity.tightest(model, fidelity.next_token(ids))
    compiled = adjcomp.compile(model, mem_budget=smallest // 2)
    with torch.no_grad():
        assert torch.isfinite(compiled(input_ids=ids, labels=ids).loss)
        assert compiled.stats.measured_peak_bytes <= smallest // 2
        with pytest.raises(adjcomp.BudgetError):
            adjcomp.compile(model, mem_budget="1KiB")(input_ids=ids, labels=ids)


def test_nll_of_a_document_is_exact() -> None:
    """Given a document, when nll is asked for, then each token's is plain's, without gradients, in training mode or not."""
    model = fidelity.mamba2(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=16)
    ids = fidelity.tokens(2, 50)
    logits = model(input_ids=ids).logits[:, :-1]
    want = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    for training in (True, False):
        compiled.train(training)
        got = compiled.nll(ids)
        assert got.shape == (2, 49)
        assert not got.requires_grad
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="T at least 2"):
        compiled.nll(ids[:, :1])


def test_functions_of_the_logits_return_without_them() -> None:
    """Given a forward that returns log-likelihoods and hits by token, when it is trained, then gradients are exact and no tensor
    is as large as all logits.
    """
    torch.manual_seed(0)
    model = Scored()
    compiled = adjcomp.compile(model, chunk=8)
    ids = fidelity.tokens(1, 128, vocab=31)
    targets = ids.roll(-1, 1)
    fidelity.compare(model, compiled, lambda run: -run(ids, targets)[0].mean())
    with Largest() as largest:
        chosen, hits = compiled(ids, targets)
    assert chosen.shape == hits.shape == (1, 128)
    assert hits.dtype is torch.bool
    assert largest.elements < 128 * 31 // 2


def test_calls_for_the_models_own_forward_stay_plain() -> None:
    """Given no gradients, when logits or a cache are asked for, then the model's own forward answers."""
    model = fidelity.mamba(num_hidden_layers=1).eval()
    compiled = adjcomp.compile(model)
    ids = fidelity.tokens(1, 8)
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=ids).logits, model(input_ids=ids).logits)
        assert compiled(input_ids=ids, labels=ids, use_cache=True).cache is not None
    with pytest.raises(RuntimeError, match="no plan yet"):
        _ = compiled.plan
