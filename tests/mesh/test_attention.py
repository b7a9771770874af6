"""Hybrid stacks on a mesh: ranks share layers, never the time of what attends to all of it."""

from __future__ import annotations

import pytest
from attending import on_a_mesh
from ranks import run_ranks


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_share_the_layers_of_a_hybrid() -> None:
    ended = run_ranks(2, on_a_mesh, "layers", seconds=280)
    assert [end.error for end in ended] == ["", ""]
    for end in ended:
        distance, predicted, measured = end.result
        assert distance <= 1e-10
        assert measured <= predicted


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_are_told_that_they_cannot_share_its_time() -> None:
    ended = run_ranks(2, on_a_mesh, "time", seconds=280)
    assert all("attends to all tokens before its own" in end.error for end in ended)
