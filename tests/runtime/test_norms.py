"""Norms of adjoint states."""

from __future__ import annotations

import pytest
import torch

from adjcomp.runtime import norms


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_parts_are_joined_and_gaps_are_zeros(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given adjoint states of several parts, some of them absent, then each one's norm is that of all its parts together."""
    monkeypatch.setattr(norms, "BATCH", batch)
    noted = norms.AdjointNorms()
    states = {(4, 1): [torch.randn(2, 3), None, torch.randn(5)], (2, 0): [torch.randn(7)], (4, 0): [None]}
    for (layer, chunk), held in states.items():
        noted.note(layer, chunk, held)
    whole = torch.cat([part.flatten() for part in states[4, 1] if part is not None])
    expected = torch.tensor([[states[2, 0][0].norm(), 0.0], [0.0, whole.norm()]])
    torch.testing.assert_close(noted.matrix([2, 4], 2), expected)


def test_nothing_noted_is_zeros() -> None:
    """Given a step whose backward never ran, then norms are zeros."""
    assert not norms.AdjointNorms().matrix([0, 1], 3).any()
