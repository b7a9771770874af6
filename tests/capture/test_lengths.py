"""One trace serves every length, the shortest included."""

from __future__ import annotations

import pytest
import torch
from fidelity import compare
from generated import BlockSpec, CallSpec, StackSpec, build, call_of

import adjcomp
from adjcomp.compiled import session_of


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_two_tokens_and_a_shifted_loss_take_the_trace_of_many(tokens: bool, norm: str) -> None:
    """Given a loss on T - 1 steps, when T is two after ten, then the size of one needs no trace of its own, and gradients are
    exact.
    """
    spec = StackSpec((BlockSpec(norm=norm, in_place=True),), tokens=tokens, loss="shifted")
    model = build(spec)
    compiled = adjcomp.compile(model)
    for length in (10, 2, 3):
        compare(model, compiled, call_of(spec, CallSpec(3, length, 1)), 1e-10)
    assert len(session_of(compiled).captures) == 1


def test_a_branch_of_the_model_on_one_step_is_its_own() -> None:
    """Given a model that does otherwise for one step, when it is called with one, then that has a trace of its own."""

    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, _ = adjcomp.ops.linear_scan(torch.full_like(x, 0.5), self.mix(x))
            return x + (2 * h if x.shape[1] == 1 else h)

    model = Branching().double()
    compiled = adjcomp.compile(model)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for length in (5, 1, 2):
        part = x[:, :length]
        compare(model, compiled, lambda run, part=part: run(part).square().sum(), 1e-10)
    assert len(session_of(compiled).captures) == 2
