"""Cases A01–A10: edge lengths, tile shapes, extreme numbers, groups, normalisations, complex states, large batches."""

from __future__ import annotations

import pytest
import torch
from fidelity import FAMILIES, compare, distance, falcon_mamba, mamba, mamba2, measure, next_token, tightest, tokens
from torch import Tensor, nn

import adjcomp
from adjcomp.ir.actions import Recompute

LENGTHS = (2, 3, 4, 5, 7, 8, 17, 31, 33, 63, 65, 127, 129, 257)


def fill_step_bias(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_proj.bias", "dt_bias")):
                parameter.fill_(value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a01_every_length_has_plain_gradients(family: str) -> None:
    """Positions past the end must not leak into decays and step biases, however short the sequence is."""
    model = FAMILIES[family]()
    fill_step_bias(model, 3.0)
    compiled = adjcomp.compile(model, chunk=16)
    # Its normalised steps amplify rounding: plain and ours are each up to 8e-6 from float64, and 1.4e-5 apart at 127 tokens.
    bound = 2e-5 if family == "falcon_mamba" else 1e-5
    for length in LENGTHS:
        compare(model, compiled, next_token(tokens(1, length)), bound)
    compare(model, compiled, lambda m: m(input_ids=tokens(1, 1)).logits.square().mean())
    with pytest.raises(ValueError, match="sequence length"):
        compiled(input_ids=torch.zeros(1, 0, dtype=torch.long), labels=torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 33])
def test_a01_every_length_fits_its_tightest_budget(family: str, length: int) -> None:
    """The smallest plan recomputes the most: its tiles meet the same ends of the sequence."""
    model = FAMILIES[family](num_hidden_layers=2)
    fill_step_bias(model, 3.0)
    call = next_token(tokens(1, length))
    compare(model, adjcomp.compile(model, mem_budget=tightest(model, call)), call)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_a02_every_chunk_length_has_plain_gradients(head_dim: int) -> None:
    """No chunk length may run past the diagonal of a block, whatever the chunk_size of the model's own kernel."""
    model = mamba2(chunk_size=256, head_dim=head_dim, num_heads=64 // head_dim, num_hidden_layers=2)
    for chunk in (16, 64, 256):
        compiled = adjcomp.compile(model, chunk=chunk)
        for length in (300, 700):
            compare(model, compiled, next_token(tokens(1, length)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a02_every_chunk_length_has_plain_gradients_on_a_gpu(head_dim: int) -> None:
    model = mamba2(chunk_size=256, head_dim=head_dim, num_heads=64 // head_dim).cuda()
    for chunk in (16, 64, 256):
        compare(model, adjcomp.compile(model, chunk=chunk), next_token(tokens(1, 300).cuda()))


def strong_decay(family: str, bias: float) -> nn.Module:
    model = FAMILIES[family](num_hidden_layers=2)
    fill_step_bias(model, bias)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(4.0)
    return model


@pytest.mark.parametrize("bias", [6.0, 20.0, 60.0])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a05_strong_decay_stays_finite_and_exact(family: str, bias: float) -> None:
    """exp of a slightly positive rounded difference must not reach inf: bf16 no worse than plain bf16, float32 exact."""
    model = strong_decay(family, bias)
    call = next_token(tokens(1, 64))
    # There the gated norm amplifies rounding 500 times: rounding the scan's output once more moves plain's by 3e-5.
    bound = {("mamba2", 20.0): 2e-5, ("mamba2", 60.0): 1e-4}.get((family, bias), 1e-5)
    exact = compare(model, adjcomp.compile(model, chunk=16), call, bound)
    low = strong_decay(family, bias).to(torch.bfloat16)
    plain = measure(low, lambda: call(low))
    ours = measure(low, lambda: call(adjcomp.compile(low, chunk=16)))
    for gradients in (plain, ours):
        assert all(g is not None and bool(g.isfinite().all()) for g in gradients.grads.values())

    def error(name: str, gradients: dict[str, Tensor | None]) -> float:
        return float((gradients[name].float() - exact.grads[name]).norm() / exact.grads[name].norm().clamp_min(1e-30))

    worst = {kind: max(error(name, g.grads) for name in exact.grads) for kind, g in (("plain", plain), ("ours", ours))}
    assert worst["ours"] <= 1.5 * worst["plain"] + 1e-3


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a05_each_slice_of_the_projections_is_exact(family: str) -> None:
    """A dropped exp in the gradient of B hides in a matrix whose other rows are right: x, B, C and dt rows are compared apart."""
    model = strong_decay(family, 6.0)
    call = next_token(tokens(1, 64))
    plain = measure(model, lambda: call(model)).grads
    ours = measure(model, lambda: call(adjcomp.compile(model, chunk=16))).grads
    suffix, sizes = ("x_proj.weight", [4, 8, 8]) if family == "mamba" else ("in_proj.weight", [64, 64, 16, 16, 4])
    everything = sum(float(g.norm()) ** 2 for g in plain.values()) ** 0.5
    for name in (n for n in plain if n.endswith(suffix)):
        for got, want in zip(ours[name].split(sizes), plain[name].split(sizes), strict=True):
            assert float((got - want).norm()) <= 1e-5 * float(want.norm()) + 1e-8 * everything


@pytest.mark.parametrize("groups", [2, 4])
def test_a06_groups_of_the_gated_norm(groups: int) -> None:
    """The norm's backward must use the width of a group."""
    model = mamba2(n_groups=groups)
    compare(model, adjcomp.compile(model, chunk=16), next_token(tokens(2, 40)))


def test_a06_clamped_steps_have_no_gradient() -> None:
    """With a limit on the step, a clamped head's bias has an exactly zero gradient, as in plain."""
    model = mamba2(time_step_limit=(0.0, 0.01))
    call = next_token(tokens(2, 40))
    plain = compare(model, adjcomp.compile(model, chunk=16), call)
    ours = measure(model, lambda: call(adjcomp.compile(model, chunk=16)))
    biases = [name for name in plain.grads if name.endswith("dt_bias")]
    assert [int((plain.grads[name] == 0).sum()) for name in biases] == [1, 1, 1, 0]
    assert all(torch.equal(ours.grads[name] == 0, plain.grads[name] == 0) for name in biases)


class NoNorm(nn.Identity):
    """Stands where a norm was; the mixer also reads its weight, which a norm without one has as None."""

    weight = None


def test_a07_recomputation_repeats_the_norms_of_falcon_mamba() -> None:
    """B, C and dt are normalised in FalconMamba: once, also where the mixer is run again."""
    model = falcon_mamba()
    call = next_token(tokens(2, 37))
    loose, tight = adjcomp.compile(model), adjcomp.compile(model, mem_budget=tightest(model, call))
    first = measure(model, lambda: call(loose))
    second = measure(model, lambda: call(tight))
    recomputed = {a.layer for a in tight.plan.actions if isinstance(a, Recompute)}
    assert recomputed >= {1, 2, 3, 4}
    assert distance(second, first) <= 1e-5
    compare(model, tight, call)
    plain = call(model).item()
    for layer in model.backbone.layers:
        layer.mixer.dt_layernorm = layer.mixer.b_layernorm = layer.mixer.c_layernorm = NoNorm()
    assert abs(call(tight).item() - plain) > 1e-3


class LRU(nn.Module):
    """h[t] = λ h[t-1] + sqrt(1 - |λ|²) B x[t]; y = x + gelu(Re(C h) + d x). λ is constant, or decays with the input."""

    def __init__(self, width: int = 6, states: int = 5, selective: bool = False) -> None:
        super().__init__()
        self.nu, self.theta, self.d = (
            nn.Parameter(torch.rand(states) - 1),
            nn.Parameter(torch.rand(states)),
            nn.Parameter(torch.rand(width)),
        )
        self.B = nn.Parameter(torch.randn(states, width, dtype=torch.cfloat) / width**0.5)
        self.C = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat) / states**0.5)
        self.gate = nn.Linear(width, states) if selective else None

    def forward(self, x: Tensor) -> Tensor:
        lam = torch.exp(torch.complex(-self.nu.exp(), self.theta.exp()))
        driven = torch.sqrt(1 - lam.abs() ** 2) * (x.to(lam.dtype) @ self.B.T)
        decay = lam.expand_as(driven) if self.gate is None else lam * torch.sigmoid(self.gate(x))
        h, _ = adjcomp.ops.linear_scan(decay, driven)
        return x + nn.functional.gelu((h @ self.C.T).real + self.d * x)


class Layers(nn.Sequential):
    """Float sequences through layers, no stem and no head."""


def as_dtype(model: nn.Module, double: bool) -> nn.Module:
    for parameter in model.parameters():
        kinds = (
            {True: torch.complex128, False: torch.complex64}
            if parameter.is_complex()
            else {True: torch.float64, False: torch.float32}
        )
        parameter.data = parameter.data.to(kinds[double])
    return model


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("double", [True, False])
def test_a08_complex_recurrences(selective: bool, double: bool) -> None:
    """Both scanned values get their conjugates: real and imaginary parts agree separately, in the parameter's own dtype."""
    torch.manual_seed(0)
    model = as_dtype(Layers(LRU(selective=selective), LRU(selective=selective)), double)
    bound = 1e-10 if double else 1e-5
    for length in (7, 64, 130):
        x = torch.randn(1, length, 6, dtype=torch.float64 if double else torch.float32)
        compiled = adjcomp.compile(model, chunk=16)
        plain = compare(model, compiled, lambda m, x=x: (m(x) ** 2).sum(), bound)
        ours = measure(model, lambda c=compiled, x=x: (c(x) ** 2).sum())
        for name in ("0.B", "0.C", "1.B", "1.C"):
            got, want = ours.grads[name], plain.grads[name]
            assert got.dtype is model.get_parameter(name).dtype
            assert float(want.imag.norm()) > 0
            for part in ("real", "imag"):
                assert float((getattr(got, part) - getattr(want, part)).norm()) <= bound * float(want.norm())


def test_a08_complex_recurrences_pass_gradcheck() -> None:
    """Differences along random directions agree with the gradients of input and parameters (gradcheck itself runs one graph
    twice).
    """
    torch.manual_seed(0)
    model = as_dtype(Layers(LRU(selective=True), LRU()), double=True)
    compiled = adjcomp.compile(model, chunk=3)
    x = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    weights = torch.randn(1, 5, 6, dtype=torch.float64)
    grads = torch.autograd.grad((compiled(x) * weights).sum(), leaves)
    for _ in range(4):
        step = [torch.randn_like(leaf) * 1e-6 for leaf in leaves]
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for leaf, change in zip(leaves, step, strict=True):
                    leaf.add_(change, alpha=sign)
                ends.append(float((compiled(x) * weights).sum()))
                for leaf, change in zip(leaves, step, strict=True):
                    leaf.sub_(change, alpha=sign)
        slope = sum(float((g.conj() * change).real.sum()) for g, change in zip(grads, step, strict=True))
        assert (ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=1e-6)


def split_batch(model: nn.Module, whole: Tensor, chunk: int) -> None:
    half = len(whole) // 2
    compiled = adjcomp.compile(model, chunk=chunk)
    together = measure(model, lambda: compiled(input_ids=whole).logits.square().sum())
    apart = measure(
        model,
        lambda: compiled(input_ids=whole[:half]).logits.square().sum() + compiled(input_ids=whole[half:]).logits.square().sum(),
    )
    assert distance(together, apart) <= 1e-5
    with torch.no_grad():
        assert float(compiled(input_ids=whole[-1:]).logits.abs().max()) > 0


TINY = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}


@pytest.mark.slow
def test_a10_more_than_65535_rows() -> None:
    """A batch above the largest grid dimension of a GPU is the sum of its halves."""
    split_batch(mamba(**TINY, state_size=4, time_step_rank=1), tokens(65537, 5, vocab=16), 5)


def test_a10_more_rows_than_fit_a_tile_on_the_cpu() -> None:
    """The same on a CPU, at a size a quick test affords."""
    split_batch(mamba(**TINY, state_size=4, time_step_rank=1), tokens(4099, 5, vocab=16), 5)
    split_batch(mamba2(**TINY, num_heads=2, head_dim=8, state_size=4), tokens(1025, 9, vocab=16), 4)


@pytest.mark.gpu
def test_a10_more_than_65535_rows_or_chunks_on_a_gpu() -> None:
    split_batch(mamba(**TINY, state_size=4, time_step_rank=1).cuda(), tokens(65537, 5, vocab=16).cuda(), 5)
    split_batch(mamba2(**TINY, num_heads=16, head_dim=1, state_size=4).cuda(), tokens(4100, 9, vocab=16).cuda(), 9)


def test_a10_long_sequences_of_short_chunks() -> None:
    """Zero inputs without biases leave no state, so the gradients are those of the last tokens alone."""
    model = mamba(**TINY, state_size=4, time_step_rank=1, use_conv_bias=False)
    ids = tokens(1, 128, vocab=16)
    length = 128 + 16 * 64
    embeds = torch.zeros(1, length, 8)
    embeds[:, -128:] = model.get_input_embeddings()(ids).detach()
    labels = torch.full((1, length), -100)
    labels[:, -128:] = ids
    alone = measure(model, lambda: model(inputs_embeds=embeds[:, -128:], labels=ids).loss)
    labels[:, -128] = -100  # its predecessor is a zero here and nothing there
    compiled = adjcomp.compile(model, chunk=16)
    assert distance(measure(model, lambda: compiled(inputs_embeds=embeds, labels=labels).loss), alone) <= 1e-5
