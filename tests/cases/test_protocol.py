"""Cases A25–B07: DDP, hooks, checkpointing, dropout, buffers, budgets, leaks, changes between forward and backward."""

from __future__ import annotations

import gc
import socket
from collections import Counter
from typing import Any

import pytest
import torch
from fidelity import Block, Gradients, Residual, compare, diagonal_stack, distance, mamba, measure, next_token, tightest, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import adjcomp
from adjcomp.ir.actions import Recompute


def shared_mamba() -> nn.Module:
    model = mamba(num_hidden_layers=3)
    model.backbone.layers[2] = model.backbone.layers[1]
    return model


def ddp_worker(rank: int, port: int, budget: int) -> None:
    """One of two processes: its own batch, gradients averaged by DistributedDataParallel, compared with plain's mean."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    try:
        model = shared_mamba()
        plain = [measure(model, lambda seed=seed: next_token(tokens(1, 64, seed))(model)) for seed in (0, 1)]
        compiled = adjcomp.compile(model, mem_budget=budget)
        parallel = nn.parallel.DistributedDataParallel(compiled)
        got = measure(model, lambda: next_token(tokens(1, 64, rank))(parallel))
        mean = Gradients(plain[rank].loss, {n: (plain[0].grads[n] + plain[1].grads[n]) / 2 for n in plain[0].grads})
        assert distance(got, mean) <= 1e-5
        assert any(isinstance(action, Recompute) for action in compiled.plan.actions)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_a25_data_parallel_training() -> None:
    """A shared and recomputed parameter is reported ready once; gradients are the mean over ranks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    budget = tightest(shared_mamba(), next_token(tokens(1, 64)))
    torch.multiprocessing.spawn(ddp_worker, (port, budget), nprocs=2)


def count_into(counts: Counter[str], name: str) -> Any:
    def hook(*_: Any) -> None:
        counts[name] += 1

    return hook


def test_a26_parameter_hooks_fire_once_with_the_whole_gradient() -> None:
    """However many tiles add to a gradient, its hooks see it once and complete."""
    model = mamba()
    call = next_token(tokens(2, 16))
    weight = model.backbone.layers[2].mixer.in_proj.weight
    counts: Counter[str] = Counter()
    seen: list[Tensor] = []
    weight.register_hook(count_into(counts, "tensor"))
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(count_into(counts, "accumulated"))
    compiled = adjcomp.compile(model, chunk=4)
    plain = measure(model, lambda: call(model)).grads["backbone.layers.2.mixer.in_proj.weight"]
    counts.clear()
    seen.clear()
    measure(model, lambda: call(compiled))
    assert counts == {"tensor": 1, "accumulated": 1}
    torch.testing.assert_close(seen[0], plain, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a26_hooks_on_inner_modules_are_refused_by_name(register: str) -> None:
    """They would not run inside of tiles; on the root module they run around the call."""
    model = mamba(num_hidden_layers=3)
    call = next_token(tokens(2, 16))
    compiled = adjcomp.compile(model, chunk=4)
    counts: Counter[str] = Counter()
    handle = getattr(model.backbone.layers[2], register)(count_into(counts, "inner"))
    with pytest.raises(adjcomp.CaptureError, match=r"backbone\.layers\.2"):
        call(compiled)
    handle.remove()
    getattr(model, register)(count_into(counts, "root"))
    measure(model, lambda: call(model))
    plain = counts["root"]
    measure(model, lambda: call(compiled))
    assert counts["root"] == 2 * plain


def descend(parameter: nn.Parameter) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)


def test_a26_an_optimizer_step_inside_of_a_hook() -> None:
    """A step taken as soon as a gradient is ready must not change weights that later tiles still read."""
    call = next_token(tokens(2, 16))
    results = []
    for compiled in (False, True):
        model = mamba()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        call(adjcomp.compile(model, chunk=4) if compiled else model).backward()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, want in results[0].items():
        assert float((results[1][name] - want).norm()) <= 1e-5 * float(want.norm())


def test_a27_gradient_checkpointing() -> None:
    """The model's own flag changes nothing, and a compiled call runs inside of an outer checkpoint."""
    model = mamba(num_hidden_layers=2)
    ids = tokens(2, 16)
    reference = measure(model, lambda: next_token(ids)(model))
    model.gradient_checkpointing_enable()
    compiled = adjcomp.compile(model, chunk=5)
    assert distance(measure(model, lambda: next_token(ids)(compiled)), reference) <= 1e-5
    model.gradient_checkpointing_disable()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()

    def outer(run: nn.Module) -> Tensor:
        return checkpoint(lambda e: run(inputs_embeds=e, labels=ids).loss, embeds, use_reentrant=False)

    want = measure(model, lambda: outer(model))
    plain_input, embeds.grad = embeds.grad, None
    assert distance(measure(model, lambda: outer(compiled)), want) <= 1e-5
    torch.testing.assert_close(embeds.grad, plain_input, rtol=1e-4, atol=1e-8)


def test_a27_caches_and_no_grad() -> None:
    """use_cache in train mode keeps no cache alive; without gradients no plan is made."""
    model = mamba(num_hidden_layers=2, use_cache=True)
    ids = tokens(2, 16)
    compiled = adjcomp.compile(model, chunk=5)
    compare(model, compiled, next_token(ids))
    assert compiled(input_ids=ids, labels=ids).cache_params is None
    with torch.no_grad():
        fresh = adjcomp.compile(model)
        assert not fresh(input_ids=ids, labels=ids).loss.requires_grad
        with pytest.raises(RuntimeError, match="no plan yet"):
            _ = fresh.plan


def test_b01_dropout_is_one_sample_whatever_the_budget() -> None:
    """Recomputation draws the same mask: one loss and one gradient for all budgets and chunks, one state of the generator
    after.
    """
    model = diagonal_stack(layers=4, width=16, states=8, dropout=0.3)
    ids = tokens(2, 64, vocab=31)

    def call(run: nn.Module) -> Tensor:
        torch.manual_seed(0)
        return run(ids).square().mean()

    smallest = tightest(model, call)
    runs, states = [], []
    for budget, chunk in ((None, None), (2 * smallest, None), (smallest, None), (None, 7), (None, 1)):
        compiled = adjcomp.compile(model, mem_budget=budget, chunk=chunk)
        runs.append(measure(model, lambda compiled=compiled: call(compiled)))
        states.append(torch.get_rng_state())
    for run, state in zip(runs, states, strict=True):
        assert distance(run, runs[0]) <= 1e-5
        assert float(run.loss) == pytest.approx(float(runs[0].loss), rel=1e-6)
        assert torch.equal(state, states[0])
    assert float(runs[0].loss) != pytest.approx(float(call(model.eval())), rel=1e-3)


class OnlyDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(x @ torch.eye(x.shape[-1], dtype=x.dtype), 0.5, self.training)


def test_b01_gradients_follow_the_mask() -> None:
    """Where the mask dropped a value only the residual path is left: the gradient there is that of the identity."""
    model = Residual([OnlyDropout()], 8, None).double()
    with torch.no_grad():
        for weight in (model.embed.weight, model.head.weight):
            weight.copy_(torch.eye(8))
        model.embed.bias.zero_()
    x = torch.rand(2, 33, 8, dtype=torch.float64) + 1
    x.requires_grad_()
    out = adjcomp.compile(model, chunk=5)(x)
    out.sum().backward()
    dropped = torch.isclose(out, x)
    assert 0.4 < float(dropped.double().mean()) < 0.6
    torch.testing.assert_close(x.grad, torch.where(dropped, 1.0, 3.0).double())


class CountingBlock(Block):
    """Counts its calls in an int64 buffer and averages a statistic of its input in a float one."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x)


def counting_stack() -> Residual:
    torch.manual_seed(0)
    return Residual([CountingBlock(8) for _ in range(3)], 8)


def test_b03_buffers_change_once_a_forward() -> None:
    """However often a tile is recomputed, a counter counts steps and a running mean averages once."""
    ids = tokens(4, 32, vocab=31)

    def call(run: nn.Module) -> Tensor:
        return run(ids).square().mean()

    for budget in (None, tightest(counting_stack(), call)):
        plain, ours = counting_stack(), counting_stack()
        compiled = adjcomp.compile(ours, mem_budget=budget)
        for _ in range(3):
            want = measure(plain, lambda plain=plain: call(plain))
            got = measure(ours, lambda compiled=compiled: call(compiled))
            assert distance(got, want) <= 1e-5
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-6, atol=1e-7)
        assert int(ours.layers[1].calls) == 3


class NormedBlock(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


def test_b03_batch_norm_in_train_mode_is_refused_by_name() -> None:
    """Statistics over the whole sequence can't be had by chunks; in eval mode they are constants and all is exact."""
    torch.manual_seed(0)
    model = Residual([NormedBlock(8) for _ in range(3)], 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ids = tokens(4, 32, vocab=31)
    compiled = adjcomp.compile(model, chunk=8)
    with pytest.raises(adjcomp.CaptureError, match=r"layers\.0\.batch_norm"):
        compiled(ids)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    compare(model.eval(), compiled, lambda m: m(ids).square().mean())


def test_b04_the_measured_peak_never_exceeds_the_budget() -> None:
    """Temporaries and logits count. A smaller budget gives no larger peak, and what was predicted is what is measured."""
    model = mamba(vocab_size=512, num_hidden_layers=2)
    call = next_token(tokens(1, 256, vocab=512))
    exact = measure(model, lambda: call(model))
    smallest = tightest(model, call)
    peaks = []
    for factor in (8.0, 4.0, 2.0, 1.3, 1.0):
        compiled = adjcomp.compile(model, mem_budget=int(factor * smallest))
        assert distance(measure(model, lambda compiled=compiled: call(compiled)), exact) <= 1e-5
        stats = compiled.stats
        assert stats.measured_peak_bytes <= stats.budget_bytes == int(factor * smallest)
        assert abs(stats.measured_peak_bytes - stats.predicted_peak_bytes) <= 0.01 * stats.measured_peak_bytes + 2**10
        peaks.append(stats.measured_peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.gpu
def test_b04_the_allocators_peak_never_exceeds_the_budget() -> None:
    model = mamba(vocab_size=50280, hidden_size=768, num_hidden_layers=12, state_size=16, time_step_rank="auto").cuda().bfloat16()
    call = next_token(tokens(1, 8192, vocab=50280).cuda())
    smallest = tightest(model, call)
    for factor in (4.0, 2.0, 1.0):
        compiled = adjcomp.compile(model, mem_budget=int(factor * smallest))
        call(compiled).backward()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        call(compiled).backward()
        assert torch.cuda.max_memory_allocated() <= 1.02 * factor * smallest
        assert abs(torch.cuda.max_memory_allocated() / compiled.stats.predicted_peak_bytes - 1) <= 0.1
        model.zero_grad()


def live_bytes() -> int:
    """Bytes of all storages that a tensor looks at."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


class HookError(Exception):
    """Raised by a hook of the test."""


def test_b06_steps_leave_nothing_behind() -> None:
    """With the collector off: no growth over steps, after a hook that raises, or after a forward without backward."""
    model = mamba(num_hidden_layers=2)
    call = next_token(tokens(2, 128))
    compiled = adjcomp.compile(model, mem_budget=tightest(model, call))
    plain = measure(model, lambda: call(model))
    gc.collect()
    gc.disable()
    try:
        sizes = []
        for _ in range(30):
            call(compiled).backward()
            model.zero_grad(set_to_none=True)
            sizes.append(live_bytes())
        assert len(set(sizes[1:])) == 1

        def raises(_: Tensor) -> None:
            raise HookError

        handle = model.backbone.layers[1].mixer.in_proj.weight.register_hook(raises)
        with pytest.raises(HookError):
            call(compiled).backward()
        handle.remove()
        assert live_bytes() > sizes[-1]  # gradients that were accumulated before the hook raised
        model.zero_grad(set_to_none=True)
        call(compiled).backward()
        model.zero_grad(set_to_none=True)
        assert live_bytes() == sizes[-1]
        call(compiled)
        assert live_bytes() == sizes[-1]
    finally:
        gc.enable()
    assert distance(measure(model, lambda: call(compiled)), plain) <= 1e-5


def test_b07_values_changed_before_backward_are_named() -> None:
    """The backward would recompute with other values: an error that names the parameter or input, as plain has one."""
    model = mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=5)
    ids = tokens(1, 16)
    weight = model.backbone.layers[1].mixer.in_proj.weight
    loss = next_token(ids)(compiled)
    with torch.no_grad():
        weight.mul_(1.01)
    with pytest.raises(RuntimeError, match=r"backbone\.layers\.1\.mixer\.in_proj\.weight"):
        loss.backward()
    loss = compiled(input_ids=ids, labels=ids.clone()).loss
    ids[0, 3] += 1
    with pytest.raises(RuntimeError, match="input_ids"):
        loss.backward()
    loss = next_token(ids)(compiled)
    model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()})
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()
    compare(model, compiled, next_token(ids))  # between steps all of this is fine
