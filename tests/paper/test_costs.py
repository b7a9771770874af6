"""The paper's accounting: its counts, its table, and the sign that only fits its own figure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import adjcomp


@given(st.integers(1, 60), st.integers(1, 80))
def test_vjps_are_counted_pair_by_pair(steps: int, window: int) -> None:
    """Given a length and a window, then the counts are those of the pairs (t, i) in the sums."""
    costs = adjcomp.vjp_costs("scalar", N=2, P=3, T=steps, adjoint_window=window)
    assert costs.vjps_full == sum(t for t in range(1, steps + 1))
    assert costs.vjps_truncated == sum(min(t, window) for t in range(1, steps + 1))


def test_the_papers_example_saves_what_it_says() -> None:
    """Given T = 10,000 and a window of 2,000, then 64 % of the VJPs are saved: the count with a minus."""
    costs = adjcomp.vjp_costs("diagonal", N=225, P=128, batch=8, T=10_000, K=100, adjoint_window=2_000)
    assert round(100 * costs.saved) == 64
    assert (costs.a.flops, costs.b.flops) == (8 * 225 * 257, 8 * 225 * 257)
    assert costs.a.numbers == 8 * (225 + 225 * 128) + 225 * 129
    assert costs.stored_bytes == 2 * (8 * 10_000 * (100 * (2 * 225 + 128) + 128) + 3 * 225 * 129)
    assert costs.flops_summed < costs.flops_truncated < costs.flops_full


@pytest.mark.parametrize(("structure", "transition", "reader"), [("unstructured", 25, 35), ("diagonal", 5, 5), ("scalar", 1, 5)])
def test_table_1_row_by_row(structure: str, transition: int, reader: int) -> None:
    """Given N = 5 and P = 7, then memory and FLOPs are the table's."""
    costs = adjcomp.vjp_costs(structure, N=5, P=7, batch=3, T=10, K=2)
    assert costs.a.flops == 3 * transition * 15
    assert costs.b.flops == costs.c.flops == 3 * reader * 15
    assert costs.a.numbers == 3 * (transition + transition * 7) + transition * 8
    assert costs.vjps_truncated == costs.vjps_full
    assert costs.flops_per_vjp == costs.a.flops + 2 * costs.b.flops
    assert "VJPs 55 in full" in str(costs)


@pytest.mark.parametrize(
    ("changed", "error"),
    [({"structure": "dense"}, ValueError), ({"N": 0}, ValueError), ({"T": 2.5}, TypeError), ({"adjoint_window": 0}, ValueError)],
)
def test_wrong_sizes_are_refused_by_name(changed: dict[str, object], error: type[Exception]) -> None:
    """Given a wrong argument, then the error names it."""
    arguments = {"structure": "diagonal", "N": 2, "P": 2, "T": 4, **changed}
    with pytest.raises(error, match=next(iter(changed))):
        adjcomp.vjp_costs(arguments.pop("structure"), **arguments)
