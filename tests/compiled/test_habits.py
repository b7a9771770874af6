"""What people do around a training step, on a compiled model as on any other."""

from __future__ import annotations

from collections.abc import Callable

import fidelity
import pytest
import torch
from fidelity import compare, distance, measure, next_token, tokens
from torch import Tensor, nn

import adjcomp

IDS = tokens(2, 40)


def double(found: fidelity.Gradients) -> fidelity.Gradients:
    """The same in float64, to compare dtypes with each other."""
    return fidelity.Gradients(found.loss, {name: None if g is None else g.double() for name, g in found.grads.items()})


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_replayed_in_recomputation(family: str, dtype: torch.dtype) -> None:
    """Given autocast around the forward only, when tiles are run again in the backward, then errors are at most 1.5 times plain's
    own; and a call without autocast is exact again.
    """
    model = fidelity.FAMILIES[family](num_hidden_layers=2)
    compiled = adjcomp.compile(model, mem_budget=fidelity.tightest(model, next_token(IDS)) * 2, chunk=8)
    exact = measure(model, lambda: next_token(IDS)(model))

    def cast(run: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            return next_token(IDS)(run)

    plain, ours = (distance(measure(model, lambda run=run: cast(run)), exact) for run in (model, compiled))
    assert ours <= 1.5 * plain + 1e-6
    compare(model, compiled, next_token(IDS))


@pytest.mark.parametrize("family", fidelity.FAMILIES)
def test_parameters_in_bfloat16(family: str) -> None:
    """Given a model in bfloat16, when it trains by chunks, then gradients have its dtype, and the error of all of them together
    is at most 1.5 times plain's. (That of a single one that nearly cancels, as D's in Mamba2, is a matter of chance.)
    """
    exact_model, model = (fidelity.FAMILIES[family](num_hidden_layers=2) for _ in range(2))
    exact_model.load_state_dict(model.bfloat16().state_dict())
    exact = double(measure(exact_model, lambda: next_token(IDS)(exact_model)))
    found = [measure(model, lambda run=run: next_token(IDS)(run)) for run in (model, adjcomp.compile(model, chunk=8))]
    assert all(g is None or g.dtype is torch.bfloat16 for g in found[1].grads.values())
    plain, ours = (error_of_all(double(each), exact) for each in found)
    assert ours <= 1.5 * plain


def error_of_all(found: fidelity.Gradients, exact: fidelity.Gradients) -> float:
    """Norm of the difference over all parameters, as a share of that of the exact gradients."""
    pairs = [(found.grads[name], want) for name, want in exact.grads.items() if want is not None]
    off = sum(float((got - want).square().sum()) for got, want in pairs if got is not None)
    return (off / sum(float(want.square().sum()) for _, want in pairs)) ** 0.5


def steps(model: nn.Module, run: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer], None]) -> dict[str, Tensor]:
    """Weights after three steps; the model gets its old ones back."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        step(run, optimizer)
        optimizer.zero_grad()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return after


def test_a_grad_scaler_scales_clips_and_skips() -> None:
    """Given a GradScaler with unscaling and clipping, when one step overflows, then weights are plain's after each step."""
    model = fidelity.diagonal_stack()
    ids = tokens(2, 20, vocab=31)

    def run(view: nn.Module) -> dict[str, Tensor]:
        scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**10), iter((1.0, float("inf"), 1.0))

        def step(run: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            scaler.scale(run(ids).square().mean() * next(losses)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        after = steps(model, view, step)
        assert scaler.get_scale() == 2.0**9
        return after

    plain, ours = run(model), run(adjcomp.compile(model, chunk=6))
    for name, want in plain.items():
        torch.testing.assert_close(ours[name], want, rtol=1e-5, atol=1e-7)


def test_autograd_grad_for_embeddings_alone() -> None:
    """Given autograd.grad with respect to the inputs, when it runs, then they get plain's gradient and no .grad appears."""
    model = fidelity.mamba(num_hidden_layers=2)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    found = []
    for run in (model, adjcomp.compile(model, chunk=7)):
        loss = run(inputs_embeds=embeds, labels=IDS).loss
        found.append(torch.autograd.grad(loss, [embeds, model.lm_head.weight]))
    for ours, want in zip(found[1], found[0], strict=True):
        assert float((ours - want).norm()) <= 1e-5 * float(want.norm())
    assert all(p.grad is None for p in model.parameters())


def test_a_second_backward_is_refused_by_name() -> None:
    """Given retain_graph or create_graph, when a second or double backward is asked for, then the error says what to do."""
    compiled = adjcomp.compile(fidelity.diagonal_stack(layers=1))
    ids = tokens(1, 9, vocab=31)
    loss = compiled(ids).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second time.*Run the forward again"):
        loss.backward()
    weight = compiled.head.weight
    (grad,) = torch.autograd.grad(compiled(ids).square().mean(), [weight], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable"):
        grad.sum().backward()


def test_switching_between_train_and_eval() -> None:
    """Given dropout, when a view goes to eval and back, then eval is plain's and training drops again."""
    model = fidelity.diagonal_stack(dropout=0.5)
    compiled = adjcomp.compile(model, chunk=6)
    ids = tokens(2, 20, vocab=31)
    for _ in range(2):
        compiled.eval()
        assert not model.training
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-5, atol=1e-6)
        compiled.train()
        assert not torch.allclose(compiled(ids), compiled(ids))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}])
def test_optimizer_state_is_counted_from_the_start(options: dict[str, bool]) -> None:
    """Given any variant of Adam, and a scheduler that wraps its step, when the first step is planned, then what it will hold is
    counted, and asking for it steps nothing.
    """
    model = fidelity.diagonal_stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    ids = tokens(1, 12, vocab=31)
    model(ids).square().mean().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    compiled = adjcomp.compile(model, optimizer=optimizer)
    predicted = compiled.plan_for(example_inputs=(ids,), seq_len=12).costs.resident_bytes["optimizer"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not optimizer.state
    optimizer.step()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values()}
    assert predicted == sum(held.values())
