"""Cases A16–A23: adapters, shared and optional parameters, the loss's normalisation, changing shapes, repeated runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fidelity import FAMILIES, compare, distance, falcon_mamba, mamba, mamba2, measure, next_token, tightest, tokens
from torch import Tensor, nn

import adjcomp

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")


@pytest.mark.filterwarnings("ignore")
def test_a16_lora_adapters_train() -> None:
    """The adapted projections are called through their wrappers, so their factors get gradients and the base weights none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["in_proj", "x_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(mamba(), config).train()
    plain = compare(model, adjcomp.compile(model, chunk=5), next_token(tokens(2, 16)))
    adapters = {name for name, grad in plain.grads.items() if grad is not None and bool(grad.any())}
    assert len(adapters) == 16
    assert all("lora_" in name for name in adapters)
    assert len(plain.none()) == len(plain.grads) - 16


@pytest.mark.filterwarnings("ignore")
def test_a16_an_adapter_that_is_never_called_is_named() -> None:
    """Mamba reads dt_proj.weight without calling the module: adapting it alone trains nothing, which plain says only at
    backward.
    """
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["dt_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(mamba(num_hidden_layers=2), config).train()
    call = next_token(tokens(2, 16))
    with pytest.raises(RuntimeError, match="does not require grad"):
        call(model).backward()
    with pytest.raises(adjcomp.CaptureError, match="dt_proj"):
        call(adjcomp.compile(model))


@pytest.mark.parametrize(("shared", "tied"), [(True, False), (False, True), (True, True)])
def test_a18_shared_weights_get_the_sum(shared: bool, tied: bool) -> None:
    """A block used twice and an embedding tied to the head get every contribution once, and their hooks fire once."""
    model = mamba(tie_word_embeddings=tied)
    if shared:
        model.backbone.layers[2] = model.backbone.layers[1]
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    if tied:
        assert model.lm_head.weight is model.backbone.embeddings.weight
    if tied and not shared:
        assert len(list(model.parameters())) == 42
    call = next_token(tokens(2, 16))
    compiled = adjcomp.compile(model, chunk=5)
    compare(model, compiled, call)
    fired.clear()
    call(compiled).backward()
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("bias", "conv_bias"), itertools.product([False, True], repeat=2))
def test_a19_optional_biases(bias: bool, conv_bias: bool) -> None:
    """Whatever is switched off is absent from the VJP, and every bias there is gets a gradient of its shape."""
    for make in (mamba, mamba2, falcon_mamba):
        model = make(use_bias=bias, use_conv_bias=conv_bias, num_hidden_layers=2)
        plain = compare(model, adjcomp.compile(model, chunk=4), next_token(tokens(2, 9)))
        for name, parameter in model.named_parameters():
            assert plain.grads[name] is None or plain.grads[name].shape == parameter.shape


class SkipScan(nn.Module):
    """A selective scan with or without its skip connection D."""

    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.A, self.D = nn.Parameter(-torch.rand(width, 3)), nn.Parameter(torch.rand(width)) if skip else None
        self.maps = nn.Linear(width, width + 6)

    def forward(self, x: Tensor) -> Tensor:
        dt, B, C = self.maps(x).split([x.shape[-1], 3, 3], -1)
        return x + adjcomp.ops.selective_scan(x, dt, self.A, B, C, self.D, dt_softplus=True)[0]


@pytest.mark.parametrize("skip", [False, True])
def test_a19_a_layer_without_skip(skip: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SkipScan(6, skip), SkipScan(6, skip)).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    compare(model, adjcomp.compile(model, chunk=4), lambda m: m(x).square().sum(), 1e-10)


def test_a20_the_loss_is_divided_by_the_given_count() -> None:
    """num_items_in_batch divides the summed loss once, as a number or a tensor; accumulation adds to what is there."""
    model = mamba()
    compiled = adjcomp.compile(model, chunk=16)
    ids = tokens(2, 37)
    losses = {}
    for count in (None, 72, 144, torch.tensor(144)):
        losses[str(count)] = compare(model, compiled, next_token(ids, num_items_in_batch=count)).loss.item()
    assert losses["None"] == pytest.approx(4.346232, abs=2e-6)
    assert losses["72"] == pytest.approx(4.346232, abs=2e-6)
    assert losses["144"] == pytest.approx(2.173116, abs=2e-6)
    assert losses["tensor(144)"] == losses["144"]


def test_a20_micro_batches_accumulate() -> None:
    """Two backward passes without zero_grad add up, in the gradient tensors that were there."""
    model = mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=16)
    first, second = (next_token(tokens(2, 37, seed), num_items_in_batch=144) for seed in (1, 2))
    apart = [measure(model, lambda call=call: call(model)) for call in (first, second)]
    first(compiled).backward()
    held = {name: p.grad for name, p in model.named_parameters()}
    second(compiled).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is held[name]
        want = apart[0].grads[name] + apart[1].grads[name]
        assert float((parameter.grad - want).norm()) <= 1e-5 * float(want.norm()) + 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_a21_chunks_and_batches_without_labels(family: str) -> None:
    """0/0 in the loss poisons no gradient, and a mean is over the whole batch, never over a chunk."""
    model = FAMILIES[family](num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=8)
    ids = tokens(2, 37)
    nothing = torch.full_like(ids, -100)
    for run in (model, compiled):
        got = measure(model, lambda run=run: run(input_ids=ids, labels=nothing).loss)
        assert bool(got.loss.isnan())
        assert all(g is not None and not bool(g.any()) for g in got.grads.values())
    few, one_row = nothing.clone(), ids.clone()
    few[:, -3:] = ids[:, -3:]
    one_row[0] = -100
    for labels in (few, one_row):
        compare(model, compiled, lambda m, labels=labels: m(input_ids=ids, labels=labels).loss)


def test_a22_shapes_change_between_steps() -> None:
    """Plans belong to shapes: each call has its own, a shape seen before is not solved again, and calls in flight don't mix."""
    model = mamba2(num_hidden_layers=2)
    compiled = adjcomp.compile(model)
    plans = []
    for shape in ((2, 20), (2, 30), (1, 40), (2, 20), (3, 17)):
        compare(model, compiled, next_token(tokens(*shape)))
        plans.append(compiled.plan)
    assert plans[3] is plans[0]
    calls = [next_token(tokens(*shape)) for shape in ((2, 20), (2, 30))]

    def interleaved(run: nn.Module) -> Tensor:
        first, second = (call(run) for call in calls)
        second.backward()
        return first

    assert distance(measure(model, lambda: interleaved(compiled)), measure(model, lambda: interleaved(model))) <= 1e-5


def test_a22_a_budget_too_small_for_a_shape_names_the_shape() -> None:
    model = mamba2(num_hidden_layers=2)
    call = next_token(tokens(2, 20))
    compiled = adjcomp.compile(model, mem_budget=tightest(model, call))
    call(compiled)
    with pytest.raises(adjcomp.BudgetError, match=r"16.*4000|4000.*16"):
        compiled(input_ids=tokens(16, 4000), labels=tokens(16, 4000))


@pytest.mark.parametrize("make", [mamba, mamba2])
def test_a23_repeated_steps_are_equal(make: object) -> None:
    """No step may depend on timing: the first call equals the second bit for bit."""
    model = make(num_hidden_layers=2)  # type: ignore[operator]
    compiled = adjcomp.compile(model, chunk=32, options=adjcomp.Options(deterministic=True))
    call = next_token(tokens(2, 129))
    runs = [measure(model, lambda: call(compiled)) for _ in range(5)]
    for run in runs[1:]:
        assert all(torch.equal(run.grads[name], grad) for name, grad in runs[0].grads.items())


DIGEST = f"""
import sys; sys.path.insert(0, {SUPPORT!r})
import hashlib, json, torch, adjcomp
from fidelity import mamba, measure, next_token, tokens
torch.use_deterministic_algorithms(True)
model = mamba(num_hidden_layers=2)
compiled = adjcomp.compile(model, chunk=32, options=adjcomp.Options(deterministic=True))
found = measure(model, lambda: next_token(tokens(2, 129))(compiled))
data = b"".join(g.numpy().tobytes() for g in found.grads.values())
print(json.dumps(hashlib.sha256(data).hexdigest()))
"""


def test_a23_fresh_processes_agree(tmp_path: Path) -> None:
    """Two processes with empty caches give the same bits."""
    digests = set()
    for number in range(2):
        environment = {"ADJCOMP_CACHE_DIR": str(tmp_path / str(number)), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, env=environment, check=True)
        digests.add(json.loads(done.stdout.splitlines()[-1]))
    assert len(digests) == 1


@pytest.mark.gpu
def test_a23_repeated_steps_are_equal_on_a_gpu() -> None:
    model = mamba2().cuda().to(torch.bfloat16)
    compiled = adjcomp.compile(model, options=adjcomp.Options(deterministic=True))
    call = next_token(tokens(2, 129).cuda())
    first, second = (measure(model, lambda: call(compiled)) for _ in range(2))
    assert all(torch.equal(second.grads[name], grad) for name, grad in first.grads.items())
