"""Plans of approximate gradients for machines that need not be here: `plan`, `frontier`, `max_context`."""

from __future__ import annotations

import itertools

import fidelity
import pytest

import adjcomp


@pytest.mark.slow
def test_a_frontier_and_a_longest_context_are_of_the_gradient_that_is_asked_for() -> None:
    """Given a window or residual coupling, then every plan has its edges cut, and what that takes counts in the context."""
    model = fidelity.mamba(num_hidden_layers=1)
    quick = adjcomp.Options(solver_time_limit_seconds=0.0)
    kinds = {"exact": {}, "window": {"adjoint_window": 24}, "residual": {"coupling": "residual"}}
    curves = {name: adjcomp.frontier(model, seq_len=96, points=2, options=quick, **kind) for name, kind in kinds.items()}
    for curve in curves.values():
        for plan in curve:
            plan.verify()
        assert all(a.seconds > b.seconds for a, b in itertools.pairwise(curve))
    assert {plan.costs.adjoint_window for plan in curves["window"]} == {24}
    assert all(plan.costs.coupling == "residual" and plan.costs.shares_cotangent for plan in curves["residual"])
    assert all(not plan.costs.shares_cotangent for plan in curves["exact"])
    middle = {name: curve[0].costs.layers[1].adjoint_bytes for name, curve in curves.items()}
    assert middle["exact"] == middle["residual"] < middle["window"]
    smallest = {name: max(curve[0].peak_bytes.values()) for name, curve in curves.items()}
    assert smallest["exact"] < smallest["window"]
    budget = smallest["exact"] + 400_000
    longest = {name: adjcomp.max_context(model, budget, limit=1 << 8, **kinds[name]) for name in ("exact", "window")}
    assert 96 <= longest["window"] <= longest["exact"]


def test_what_is_no_gradient_is_refused() -> None:
    model = fidelity.mamba(num_hidden_layers=1)
    with pytest.raises(ValueError, match="coupling must be"):
        adjcomp.frontier(model, seq_len=64, coupling="loose")
    with pytest.raises(ValueError, match="at least 1 step"):
        adjcomp.max_context(model, "1GiB", adjoint_window=0)
