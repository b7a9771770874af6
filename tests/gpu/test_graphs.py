"""Tiles replayed as CUDA graphs, where there is a GPU; tests/runtime/test_recording.py has the rest, with a stand-in."""

from __future__ import annotations

import fidelity
import pytest
import torch

import adjcomp

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_gradients_are_those_of_single_launches(family: str) -> None:
    """Given three steps with changing parameters, when tiles are replayed, then gradients are those without, and all fits."""
    ids = fidelity.tokens(1, 300).to(CUDA)
    models = [fidelity.FAMILIES[family]().to(CUDA) for _ in range(2)]
    views = [
        adjcomp.compile(model, chunk=64, options=adjcomp.Options(cuda_graphs=wanted, deterministic=True))
        for model, wanted in zip(models, (True, False), strict=True)
    ]
    for step in range(3):
        for view in views:
            view.zero_grad(set_to_none=True)
            view(input_ids=ids, labels=ids).loss.backward()
        for (name, got), want in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-8, msg=f"{name}, step {step}")
        assert views[0].stats.measured_peak_bytes <= views[0].stats.predicted_peak_bytes
        assert views[0].stats.replayed_tiles > 0
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.01).step()


def test_memory_of_recordings_comes_back() -> None:
    """Given recorded tiles, when a call without gradients takes their place, then no more is allocated than before they were."""
    model = fidelity.mamba().to(CUDA)
    ids = fidelity.tokens(1, 300).to(CUDA)
    compiled = adjcomp.compile(model, chunk=64, options=adjcomp.Options(cuda_graphs=True))
    with torch.no_grad():
        compiled(input_ids=ids, labels=ids)
    before = torch.cuda.memory_allocated()
    compiled(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    assert compiled.stats.replayed_tiles > 0
    with torch.no_grad():
        compiled(input_ids=ids, labels=ids)
    assert torch.cuda.memory_allocated() - before <= 2 * (32 << 20)  # the workspaces of cuBLAS stay
