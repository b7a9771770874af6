"""Models written with mamba_ssm and causal_conv1d train, whatever name their modules give the packages' functions."""

from __future__ import annotations

import sys
import types

import mamba_ssm_models
import pytest
import torch
from torch.nn import functional

import adjcomp


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Stand-ins for the packages, loaded and imported by the models' module."""
    made = mamba_ssm_models.packages()
    for home, module in made.items():
        monkeypatch.setitem(sys.modules, home, module)
    for name, function in mamba_ssm_models.bind(made).items():
        monkeypatch.setattr(mamba_ssm_models, name, function, raising=False)
    return made


def gradients(model: torch.nn.Module, run: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    functional.cross_entropy(run(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


SOON = ("mamba", "mamba2 by parts")


@pytest.mark.parametrize("name", [n if n in SOON else pytest.param(n, marks=pytest.mark.slow) for n in mamba_ssm_models.MODELS])
def test_a_model_of_the_package_trains_by_chunks(
    name: str, packages: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given kernels that can't run here, then the compiled model has the gradients of plain forms, and names are put back."""
    torch.manual_seed(0)
    model, ids = mamba_ssm_models.MODELS[name](), torch.randint(0, 16, (2, 19))
    before = dict(vars(mamba_ssm_models))
    compiled = adjcomp.compile(model, chunk=7)
    ours = gradients(model, compiled, ids)
    assert {key: vars(mamba_ssm_models)[key] for key in before} == before
    with pytest.raises(RuntimeError, match="needs a GPU"):
        model(ids)
    for function, plain in mamba_ssm_models.FUNCTIONS.items():
        monkeypatch.setattr(mamba_ssm_models, function, plain)
    plain_ones = gradients(model, model, ids)
    assert ours.keys() == plain_ones.keys()
    everything = torch.stack([g.norm() for g in plain_ones.values()]).norm()
    for key, wanted in plain_ones.items():
        assert (ours[key] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7 * everything, key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_idx": torch.zeros(1, 8, dtype=torch.int32)}, ["seq_idx", "one document a row"]),
        ({"return_final_states": True}, ["return_final_states", "adjcomp.ops.causal_conv1d"]),
        ({"activation": "relu"}, ["'relu'", "silu"]),
    ],
)
def test_what_a_kernel_is_asked_beyond_is_refused_by_name(
    change: dict[str, object], words: list[str], packages: dict[str, types.ModuleType]
) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4, 3))
            self.first = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            conv = mamba_ssm_models._use("conv_under_another_name")
            return x + conv(self.first(x).transpose(1, 2), self.weight, **change).transpose(1, 2)

    with pytest.raises(adjcomp.CaptureError) as refused:
        adjcomp.compile(Odd())(torch.rand(1, 8, 4))
    assert all(word in str(refused.value) for word in words)
