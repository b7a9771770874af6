"""Ranges of time joined by summaries, with the Triton kernels in Triton's interpreter: states and gradients of the run in order.

Collected only where test_interpreter.py names it, in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import fidelity
import generated
import interpreted  # noqa: F401  (puts the kernels in place)
import joinable_stacks
import pytest
import torch
from joined_layers import LayerRuns, captured, errors
from torch import nn

from adjcomp.passes.split import KeepPolicy

SIZES = {"mamba": {"hidden_size": 8, "time_step_rank": 2}, "mamba2": {"hidden_size": 16, "head_dim": 8}}
USERS = (joinable_stacks.Dense, joinable_stacks.TwoWindows)


def off(model: nn.Module, layer: int, *args: torch.Tensor, **kwargs: torch.Tensor) -> float:
    """The largest relative error of three ranges of a layer over 23 steps."""
    runs = LayerRuns(captured(model, *args, **kwargs), model, 23, 9, KeepPolicy.LEAN, layer)
    return max(errors(runs, [0, 1, 2]).values())


@pytest.mark.parametrize("name", SIZES)
def test_families(name: str) -> None:
    model, ids = fidelity.FAMILIES[name](state_size=4, num_hidden_layers=1, **SIZES[name]), fidelity.tokens(1, 32)
    assert off(model, 1, input_ids=ids, labels=ids) <= 1e-5


@pytest.mark.parametrize("name", ["diagonal", "delta"])
def test_mixers(name: str) -> None:
    model = generated.build(generated.StackSpec((generated.BlockSpec(name, gate=True),), tokens=False), torch.float32)
    assert off(model, 1, torch.rand(1, 32, 4)) <= 1e-5


@pytest.mark.parametrize("layer", range(len(USERS)))
def test_users(layer: int) -> None:
    assert off(joinable_stacks.Stack(*USERS).float(), 1 + layer, torch.rand(1, 32, 4)) <= 1e-5
