"""A step that ends in the middle leaves model, gradients and generator usable, and the next step is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fidelity
import pytest
import torch
from fidelity import compare, distance, measure, next_token, tightest, tokens
from torch import nn

import adjcomp
from adjcomp.compiled import session_of
from adjcomp.runtime.tiles import Tiles

IDS = tokens(2, 32)


@contextmanager
def raising_at(monkeypatch: pytest.MonkeyPatch, method: str, number: int, error: BaseException) -> Iterator[None]:
    """`error` comes out of the `number`-th run of a tile in the forward, or of the `number`-th accumulator of the backward."""
    plain, count = getattr(Tiles, method), 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        if count == number:
            raise error
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tiles, method, counted)
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("from the middle")], ids=["interrupt", "error"])
@pytest.mark.parametrize("method", ["forward", "zeros"])
def test_an_exception_in_the_middle(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    """Given an exception in the middle of either pass, when the next step runs, then gradients are exact, those that were there
    before are as they were, and dropout goes on from the generator.
    """
    model = fidelity.diagonal_stack(dropout=0.2)
    compiled = adjcomp.compile(model, chunk=5)
    ids = tokens(2, 32, vocab=31)

    def call(run: nn.Module) -> torch.Tensor:
        torch.manual_seed(3)
        return run(ids).square().mean()

    plain = measure(model, lambda: call(compiled))
    call(compiled).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    number = 4 if method == "forward" else 9  # the 9th buffer of zeros is an accumulator: the backward is under way
    with raising_at(monkeypatch, method, number, error), pytest.raises(type(error)):
        call(compiled).backward()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    again = measure(model, lambda: call(compiled))
    assert distance(again, plain) == 0.0


def test_an_exception_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an interrupt while the model is traced, when it is called again, then everything is as if nothing had been."""
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=9)
    with monkeypatch.context() as patch:

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(type(model.backbone.norm_f), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled(input_ids=IDS, labels=IDS)
    compare(model, compiled, next_token(IDS))


@pytest.mark.parametrize("method", ["forward", "zeros"])
def test_out_of_memory_plans_again_once(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Given an allocator that fails once, in either pass, when the step runs, then it ends on a smaller plan, with a warning and
    exact gradients, and later steps stay below.
    """
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=8)
    plain = measure(model, lambda: next_token(IDS)(model))
    first = compiled.plan_for(batch_size=2, seq_len=32)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    number = 5 if method == "forward" else 12
    with raising_at(monkeypatch, method, number, error), pytest.warns(RuntimeWarning, match="planned again"):
        got = measure(model, lambda: next_token(IDS)(compiled))
    assert distance(got, plain) <= 1e-5
    assert max(compiled.plan.peak_bytes.values()) <= 0.8 * max(first.peak_bytes.values())
    compare(model, compiled, next_token(IDS))
    assert session_of(compiled).last_stats.budget_bytes <= 0.8 * max(first.peak_bytes.values())


def test_out_of_memory_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the tightest plan, when the allocator fails, then the error is an out-of-memory one that says what was tried."""
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, mem_budget=tightest(model, next_token(IDS)))
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
    with (
        raising_at(monkeypatch, "forward", 5, error),
        pytest.raises(torch.OutOfMemoryError, match=r"can't allocate memory.*no plan"),
    ):
        compiled(input_ids=IDS, labels=IDS)
    session_of(compiled).ceiling_bytes = None
    compare(model, compiled, next_token(IDS))


def test_adjoint_norms_say_how_far_gradients_reach() -> None:
    """Given the option, when a loss on the last step runs back, then norms fade towards the start, and the default has none."""
    torch.manual_seed(0)
    model = fidelity.diagonal_stack(layers=2)
    compiled = adjcomp.compile(model, chunk=8, options=adjcomp.Options(adjoint_norms=True))
    ids = tokens(2, 64, vocab=31)
    compiled(ids)[:, -1].square().sum().backward()
    norms = compiled.stats.adjoint_norms
    assert norms.shape == (2, 8)
    assert norms.dtype is torch.float32
    assert bool((norms[:, 1:] >= norms[:, :-1]).all())
    assert bool((norms[:, -1] > 0).all())
    other = adjcomp.compile(model, chunk=8)
    other(ids).sum().backward()
    assert other.stats.adjoint_norms is None
