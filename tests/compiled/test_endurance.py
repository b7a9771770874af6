"""Many steps leave nothing behind."""

from __future__ import annotations

import gc

import fidelity
import pytest
import torch

import adjcomp


def resident_bytes() -> int:
    """What the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_is_flat(steps: int) -> None:
    """Given training with changing lengths and evaluation between, when steps go on, then neither what is counted nor what the
    process holds grows.
    """
    model = fidelity.diagonal_stack(layers=2, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = adjcomp.compile(model, chunk=32, optimizer=optimizer)
    counted, held = [], []
    for i in range(steps):
        ids = fidelity.tokens(1, 256 - 16 * (i % 2), seed=i, vocab=31)
        compiled(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 9:
            gc.collect()
            counted.append(compiled.stats.measured_peak_bytes)
            held.append(resident_bytes())
    warm = len(held) // 3
    assert len(set(counted[1:])) == 1
    assert max(held[warm:]) - held[warm] <= 6 * 2**20
