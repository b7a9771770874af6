"""Shapes that change from step to step: one capture, few plans, exact gradients."""

from __future__ import annotations

import fidelity
import pytest
import torch
from fidelity import compare, next_token, tightest, tokens

import adjcomp
from adjcomp.compiled import session_of
from adjcomp.passes.schedule import search
from adjcomp.shorter import column_modes


def test_ten_lengths_take_one_capture_and_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a first length that is the longest, when nine shorter ones follow, then nothing is captured or searched again."""
    model = fidelity.mamba(num_hidden_layers=2)
    compiled = adjcomp.compile(model, chunk=16)
    searched: list[int] = []
    race = search.race
    monkeypatch.setattr(
        search, "race", lambda costs, wanted, *known: searched.append(wanted.seq_len) or race(costs, wanted, *known)
    )
    for length in (90, 17, 64, 33, 80, 48, 50, 77, 20, 90):
        compare(model, compiled, next_token(tokens(1, length)))
        assert compiled.plan.costs.seq_len == length
        compiled.plan.verify()
    assert len(session_of(compiled).captures) == 1
    assert set(searched) == {90}


@pytest.mark.parametrize("length", [100, 79, 65])
def test_a_tight_plan_serves_a_little_less(length: int) -> None:
    """Given a plan that recomputes, when a shorter sequence comes, then its plan fits the budget and gradients are exact."""
    model = fidelity.mamba(num_hidden_layers=2)
    longest = next_token(tokens(1, 100))
    compiled = adjcomp.compile(model, mem_budget=int(1.1 * tightest(model, longest, 16)), chunk=16)
    compare(model, compiled, longest)
    compare(model, compiled, next_token(tokens(1, length)))
    assert compiled.stats.measured_peak_bytes <= compiled.stats.budget_bytes


def test_modes_are_read_off_a_plan() -> None:
    """Given a plan, when its modes are read off its actions and emitted again, then the actions are the same."""
    from adjcomp.passes.emit import emit

    model = fidelity.mamba(num_hidden_layers=2)
    call = next_token(tokens(1, 64))
    for room in (1.02, 1.3, 4.0):
        compiled = adjcomp.compile(model, mem_budget=int(room * tightest(model, call, 8)), chunk=8)
        plan = compiled.plan_for(seq_len=64)
        if not any(type(action).__name__ == "Advance" for action in plan.actions):
            assert emit(plan.costs, column_modes(plan)) == plan.actions


def test_warmup_plans_ahead() -> None:
    """Given a warmed-up shape, when its first step runs, then it runs the plan that was made for it."""
    model = fidelity.mamba(num_hidden_layers=1)
    compiled = adjcomp.compile(model)
    compiled.warmup([(1, 40), (2, 24)])
    session = session_of(compiled)
    known = {id(e) for e in session.executables.values()}
    ids = tokens(2, 24)
    compiled(input_ids=ids, labels=ids.clone())
    assert {id(e) for e in session.executables.values()} == known
    assert session.last_plan is not None
    assert torch.isfinite(torch.tensor(session.last_plan.seconds))


def test_old_plans_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more shapes than plans are kept for, when they come in turn, then the number of plans stays bounded."""
    monkeypatch.setattr("adjcomp.session.PLANS_KEPT", 3)
    model = fidelity.diagonal_stack(layers=1)
    compiled = adjcomp.compile(model)
    for length in range(5, 12):
        compiled(tokens(1, length, vocab=31))
    assert len(session_of(compiled).executables) == 3
    assert len(session_of(compiled).captures) == 1
