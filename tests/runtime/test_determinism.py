"""`Options(deterministic=True)` reaches every kernel of a step, in both passes, and only there."""

from __future__ import annotations

import fidelity
import pytest
import torch
from fidelity import measure

import adjcomp
from adjcomp.ir.actions import Action
from adjcomp.runtime.executor import Step
from adjcomp.runtime.kernels.determinism import fixed_kernels, is_fixed


@pytest.mark.parametrize("deterministic", [True, False])
def test_all_actions_of_a_step_see_the_option(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the option, when a step runs, then every action of forward and backward runs with fixed kernels."""
    seen: list[bool] = []
    run = Step._run

    def watched(self: Step, action: Action) -> None:
        seen.append(is_fixed())
        run(self, action)

    monkeypatch.setattr(Step, "_run", watched)
    model = fidelity.diagonal_stack(layers=1)
    compiled = adjcomp.compile(model, chunk=4, options=adjcomp.Options(deterministic=deterministic))
    compiled(fidelity.tokens(1, 9, vocab=31)).sum().backward()
    assert len(seen) > 10
    assert set(seen) == {deterministic}
    assert not is_fixed()


def test_torch_asks_for_the_same() -> None:
    with fixed_kernels(False):
        torch.use_deterministic_algorithms(True)
        try:
            assert is_fixed()
        finally:
            torch.use_deterministic_algorithms(False)
    with fixed_kernels(True), fixed_kernels(False):
        assert is_fixed()


def test_reruns_give_equal_bits() -> None:
    """Given the same model and data, when it is compiled and run twice, then losses and gradients are equal bit for bit."""
    found = []
    for _ in range(2):
        model = fidelity.mamba(num_hidden_layers=2)
        compiled = adjcomp.compile(model, chunk=9, options=adjcomp.Options(deterministic=True))
        ids = fidelity.tokens(2, 40)
        found.append(measure(model, lambda compiled=compiled, ids=ids: compiled(input_ids=ids, labels=ids).loss))
    assert torch.equal(found[0].loss, found[1].loss)
    for name, grad in found[0].grads.items():
        other = found[1].grads[name]
        assert grad is not None
        assert other is not None
        assert torch.equal(grad, other), name
