"""Cases B08–B12: what can be traced, what is refused by name, modes, in-place operations, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from fidelity import (
    FAMILIES,
    Block,
    DiagonalMixer,
    Residual,
    compare,
    diagonal_stack,
    distance,
    mamba,
    measure,
    next_token,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional

import adjcomp


class OwnLoss(nn.Module):
    """A library model inside a user's module that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_b08_library_models_as_they_are(family: str) -> None:
    """Unmodified classes, bare, with a head, and inside a user's module."""
    model = FAMILIES[family](num_hidden_layers=2)
    ids = tokens(2, 17)
    compare(model, adjcomp.compile(model, chunk=5), next_token(ids))
    bare = model.backbone
    compare(bare, adjcomp.compile(bare, chunk=5), lambda m: m(input_ids=ids).last_hidden_state[..., :7].square().mean())
    wrapped = OwnLoss(model)
    compiled = adjcomp.compile(wrapped, chunk=5)
    compare(wrapped, compiled, lambda m: m(ids))
    assert not compiled.plan.costs.resident_bytes["outputs"] > 1000  # no logits: the loss is chunked


class LSTMBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


class BranchingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1:
            x = x * 0.5
        return super().forward(x)


class TanhBlock(nn.Module):
    """h[t] = tanh(a h[t-1] + b[t]): not linear in h, and a Python loop over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        driven = self.b(x)
        for t in range(x.shape[1]):
            h = torch.tanh(self.a * h + driven[:, t])
            out.append(h)
        return x + torch.stack(out, 1)


class BidirectionalBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.forwards, self.backwards = DiagonalMixer(width), DiagonalMixer(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.forwards(x) + self.backwards(x.flip(1)).flip(1)


@pytest.mark.parametrize(
    ("block", "path", "reason"),
    [
        (LSTMBlock, "layers.1", "lstm"),
        (AttentionBlock, "layers.1.attn", "not causal in time"),
        (BranchingBlock, "layers.1", "depends on the values"),
        (TanhBlock, "layers.1", "sequence length"),
        (BidirectionalBlock, "layers.1", "flip"),
    ],
)
def test_b09_what_cannot_be_cut_is_named(block: Callable[[int], nn.Module], path: str, reason: str) -> None:
    """Another kind of layer between two that can be cut: an error of its own type with the module's path and why; nothing is
    changed.
    """
    torch.manual_seed(0)
    model = Residual([Block(8), block(8), Block(8)], 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ids = tokens(2, 12, vocab=31)
    with pytest.raises(adjcomp.CaptureError) as caught:
        adjcomp.compile(model, mem_budget="1GiB")(ids)
    assert path in str(caught.value)
    assert reason in str(caught.value).lower()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    model(ids).sum().backward()


class FunctionalDropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.mixer(self.norm(x)), 0.5, training=self.training)


@pytest.mark.parametrize("first", [True, False])
def test_b10_train_and_eval_are_traced_apart(first: bool) -> None:
    """The training flag is part of what a trace is reused for."""
    torch.manual_seed(0)
    model = Residual([FunctionalDropout(16) for _ in range(2)], 16).train(first)
    compiled = adjcomp.compile(model, chunk=5)
    ids = tokens(2, 17, vocab=31)

    def call(run: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return run(ids).square().mean()

    for training in (first, not first, first):
        compiled.train(training)
        assert model.training is training
        assert all(module.training is training for module in model.modules())
        if training:
            ours, again = (measure(model, lambda run=run: call(run)) for run in (compiled, adjcomp.compile(model, chunk=16)))
            assert distance(again, ours) <= 1e-5
            assert not torch.equal(compiled(ids), compiled(ids))
        else:
            assert torch.equal(compiled(ids), compiled(ids))
            compare(model, compiled, call)


class InPlaceBlock(nn.Module):
    """Blocks that end with an in-place operation."""

    def __init__(self, kind: str, width: int = 6) -> None:
        super().__init__()
        self.kind, self.mixer, self.project = kind, DiagonalMixer(width, 3), nn.Linear(width, width)
        self.silu = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.mixer(x + 0))  # x itself is saved by nothing, or plain could not write to it
        match self.kind:
            case "view":
                z = y[:]
                z.relu_()
                return x + z
            case "silu":
                return x + self.silu(y)
            case "input":
                return x.add_(y)
            case "preallocated":
                out = torch.empty_like(y)
                out[:, :, :2] = y[:, :, 4:]
                out[:, :, 2:] = y[:, :, :4]
                return x + out
        raise ValueError(self.kind)


@pytest.mark.parametrize("kind", ["view", "silu", "input", "preallocated"])
def test_b11_in_place_operations_are_exact(kind: str) -> None:
    """No gradient is None where plain has one, and no saved value is overwritten."""
    torch.manual_seed(0)
    model = Residual([InPlaceBlock(kind) for _ in range(2)], 6, None).double()
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    before = x.clone()
    for chunk in (5, None):
        plain = compare(model, adjcomp.compile(model, chunk=chunk), lambda m: m(x).square().sum(), 1e-10)
        assert not plain.none()
    assert torch.equal(x, before)


def test_b11_the_callers_tensor_changes_as_in_plain() -> None:
    """A block that writes to its input writes to the caller's tensor where there is no stem."""
    torch.manual_seed(0)
    model = nn.Sequential(InPlaceBlock("input"), InPlaceBlock("input")).double()
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    mine, theirs = x.clone(), x.clone()
    plain = measure(model, lambda: model(theirs).square().sum())
    compiled = adjcomp.compile(model, chunk=5)
    assert distance(measure(model, lambda: compiled(mine).square().sum()), plain) <= 1e-10
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.equal(mine, x)


class StateLoop(nn.Module):
    """A Python loop over time that updates its state in place, or writes each step into a preallocated tensor."""

    def __init__(self, width: int, in_place: bool) -> None:
        super().__init__()
        self.a, self.b, self.in_place = nn.Parameter(torch.rand(width)), nn.Linear(width, width), in_place

    def forward(self, x: Tensor) -> Tensor:
        driven, h, out = self.b(x), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = h.mul_(self.a).add_(driven[:, t]) if self.in_place else self.a * h + driven[:, t]
            out[:, t] = h
        return x + out


@pytest.mark.parametrize("in_place", [True, False])
def test_b11_loops_over_time_are_refused_by_name(in_place: bool) -> None:
    """A loop fixes the sequence length; the error names the module and the op that takes the loop's place."""
    model = Residual([Block(6), StateLoop(6, in_place)], 6).double()
    with pytest.raises(adjcomp.CaptureError, match=r"(?s)layers\.1.*linear_scan"):
        adjcomp.compile(model)(tokens(2, 12, vocab=31))


def test_b12_embeddings_by_keyword() -> None:
    """A float input by keyword gets its gradient."""
    model = mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=4)
    inputs = torch.randn(2, 9, 32, requires_grad=True)
    grads = []
    for run in (model, compiled):
        run(inputs_embeds=inputs).logits.square().mean().backward()
        grads.append(inputs.grad)
        inputs.grad = None
    assert float((grads[1] - grads[0]).norm()) <= 1e-5 * float(grads[0].norm())


def test_b12_outputs_keep_their_form() -> None:
    """Tuples, hidden states, parts of the logits and int32 ids: same types, keys and values as plain."""
    model = mamba()
    compiled = adjcomp.compile(model, chunk=4)
    ids = tokens(2, 9)
    for kwargs in (
        {"input_ids": ids, "return_dict": False},
        {"input_ids": ids, "output_hidden_states": True},
        {"input_ids": ids, "logits_to_keep": 3},
        {"input_ids": ids.int()},
        {"input_ids": ids, "labels": ids, "output_hidden_states": True},
    ):
        plain, ours = model(**kwargs), compiled(**kwargs)
        assert type(ours) is type(plain)
        if isinstance(plain, tuple):
            assert len(ours) == len(plain)
            torch.testing.assert_close(ours[0], plain[0], rtol=1e-4, atol=1e-5)
            continue
        assert {f.name for f in fields(ours)} == {f.name for f in fields(plain)}
        if plain.loss is None:
            torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
        else:
            assert ours.logits is None
        if plain.hidden_states is not None:
            assert len(ours.hidden_states) == len(plain.hidden_states) == 5
            for got, want in zip(ours.hidden_states, plain.hidden_states, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_b12_gradients_flow_from_the_output_that_the_loss_uses() -> None:
    """A loss on the state after layer 2 leaves layer 3 and the final norm without gradient."""
    model = mamba()
    compiled = adjcomp.compile(model, chunk=4)
    ids = tokens(2, 9)
    plain = compare(model, compiled, lambda m: m(input_ids=ids, output_hidden_states=True).hidden_states[2].square().mean())
    assert len(plain.grads) - len(plain.none()) in (21, 31)
    compare(model, compiled, lambda m: m(input_ids=ids, logits_to_keep=3).logits.square().mean())
    compare(model, compiled, lambda m: m(input_ids=ids, labels=ids, return_dict=False)[0])


class DictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = diagonal_stack(layers=2)

    def forward(self, ids: Tensor, scale: float = 1) -> dict[str, Any]:
        y = self.stack(ids) * scale
        return {"y": y, "n": 3, "aux": (y.square().mean(), None)}


def test_b12_dicts_and_plain_arguments() -> None:
    """Nested outputs with plain values in them, and a keyword that is no tensor."""
    model = DictModel()
    compiled = adjcomp.compile(model, chunk=4)
    ids = tokens(2, 9, vocab=31)
    for scale in (1, 2, 0.5):
        plain, ours = model(ids, scale=scale), compiled(ids, scale=scale)
        assert list(ours) == list(plain)
        assert (ours["n"], ours["aux"][1]) == (3, None)
        torch.testing.assert_close(ours["y"], plain["y"], rtol=1e-4, atol=1e-5)
        compare(model, compiled, lambda m, scale=scale: m(ids, scale=scale)["aux"][0])
        compare(model, compiled, lambda m, scale=scale: m(ids, scale=scale)["y"].abs().sum() + m(ids)["aux"][0])
