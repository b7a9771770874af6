"""Approximate gradients on several ranks are those of one process."""

from __future__ import annotations

import paper_ranks
import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("dimension", ["layers", "time"])
def test_ranks_compute_the_same_approximation(dimension: str) -> None:
    """Given layers or time over two ranks, then residual and truncated gradients are those of a compiled model of its own."""
    ended = run_ranks(2, paper_ranks.distances, dimension, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    assert max(max(end.result) for end in ended) <= 1e-10
