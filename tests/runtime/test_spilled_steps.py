"""Steps whose borders wait on the host: the same bits as steps whose borders don't."""

from __future__ import annotations

from dataclasses import replace

import fidelity
import pytest
import torch

import adjcomp
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import HostTier, Plan
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.machine import profile_device
from adjcomp.passes.away import ToHost, emit_away
from adjcomp.passes.emit import emit
from adjcomp.passes.nesting import Run, Tier, emit_nested
from adjcomp.passes.schedule.search import build_plan
from adjcomp.runtime import host
from adjcomp.shorter import column_modes
from adjcomp.stepping import Stats

HOST = HostTier(1 << 30, 25e9, 5e-6)


def gradients(model: torch.nn.Module, plan: Plan, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], Stats]:
    """Gradients of one step under a plan, and its figures."""
    model.zero_grad(set_to_none=True)
    view = adjcomp.compile(model, plan=plan)
    view(input_ids=ids, labels=ids.clone()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, view.stats


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_gradients_are_the_same_bits_with_and_without_spilling(family: str) -> None:
    """Given a plan, when its borders are spilled, then each gradient is equal bit for bit, and the device needs what is said."""
    model, ids = fidelity.FAMILIES[family](num_hidden_layers=2), fidelity.tokens(2, 100)
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.plan(model, 1, batch_size=2, seq_len=100, chunk=16)
    flat = adjcomp.plan(model, caught.value.minimum_bytes + 20_000, batch_size=2, seq_len=100, chunk=16)
    expected, _ = gradients(model, flat, ids)
    for ahead in (False, True):  # the second step finds the first one's host memory
        actions = emit_away(ToHost(flat.costs, ahead), column_modes(flat))
        spilled = build_plan(flat.costs, actions, 1 << 34, "cpu", HOST)
        spilled.verify()
        assert any(isinstance(a, Fetch) for a in spilled.actions)
        found, stats = gradients(model, Plan.from_json(spilled.to_json()), ids)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert stats.measured_peak_bytes == stats.predicted_peak_bytes


def test_gradients_are_the_same_bits_with_borders_in_two_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a nested plan, when its deepest borders wait on the host, then each gradient is equal bit for bit, and both memories
    take what is said: a place on the host that a border has left serves the next.
    """
    model, ids = fidelity.mamba2(num_hidden_layers=2), fidelity.tokens(2, 150)
    costs = adjcomp.plan(model, None, batch_size=2, seq_len=150, chunk=16).costs
    lean = [ColumnMode(0)] * costs.chunk_count
    taken: list[int] = []
    borrow = host._borrow
    monkeypatch.setattr(host, "_borrow", lambda device, size: (taken.append(size), borrow(device, size))[1])
    expected, _ = gradients(model, build_plan(costs, emit(costs, lean), 1 << 34, "cpu"), ids)
    middle = [Run(4, 6), Run(6, 7), Run(7, 7), Run(6, 6), Run(4, 5), Run(5, 5), Run(4, 4)]
    runs = [Run(9, 9), Run(8, 8), *middle, Run(0, 2), Run(2, 3), Run(3, 3), Run(2, 2), Run(0, 1), Run(1, 1), Run(0, 0)]
    for tier in (Tier(1, False), Tier(2, False), Tier(3, True), Tier(9, True)):
        plan = build_plan(costs, emit_nested(costs, lean, runs, tier), 1 << 34, "cpu", HOST)
        plan.verify()
        assert {Offload, Load, Fetch} <= {type(action) for action in plan.actions}
        border = sum(tile.carry_bytes for tile in costs.layers)
        assert plan.host_peak_bytes["cpu"] == min(tier.places, 3) * border
        found, stats = gradients(model, Plan.from_json(plan.to_json()), ids)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert stats.measured_peak_bytes == stats.predicted_peak_bytes
        assert plan.host_peak_bytes["cpu"] <= taken[-1] < 1.2 * plan.host_peak_bytes["cpu"] + 4096


def test_the_planner_spills_where_it_may_and_the_plan_runs() -> None:
    """Given an accelerator's host budget, when borders don't fit, then they are spilled; the plan trains the model anywhere."""
    model, ids = fidelity.mamba(state_size=64, num_hidden_layers=2), fidelity.tokens(1, 512)
    options = adjcomp.Options(host_budget="1GiB")
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.plan(model, 1, seq_len=512, chunk=16, machine="a100-40gb")
    budget = caught.value.minimum_bytes
    spilled = adjcomp.plan(model, budget, seq_len=512, chunk=16, machine="a100-40gb", options=options)
    spilled.verify()
    assert any(isinstance(a, Offload) for a in spilled.actions)
    assert spilled.host_peak_bytes["a100-40gb"] > 0
    assert "borders wait on the host" in str(spilled)
    resident = adjcomp.plan(model, budget, seq_len=512, chunk=16, machine="a100-40gb")
    assert spilled.seconds < resident.seconds
    expected, _ = gradients(model, resident, ids)
    found, stats = gradients(model, spilled, ids)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert stats.measured_peak_bytes <= budget


def test_a_forward_without_backward_leaves_nothing() -> None:
    model, ids = fidelity.mamba(num_hidden_layers=1), fidelity.tokens(1, 64)
    costs = adjcomp.plan(model, None, seq_len=64, chunk=16).costs
    modes = [ColumnMode(0)] * 4
    plan = build_plan(costs, emit_away(ToHost(costs, False), modes), 1 << 34, "cpu", HOST)
    view = adjcomp.compile(model, plan=plan)
    loss = view(input_ids=ids, labels=ids.clone()).loss
    del loss
    view(input_ids=ids, labels=ids.clone()).loss.backward()
    assert view.stats.measured_peak_bytes == plan.peak_bytes["cpu"]


def test_a_cpu_has_no_host_beside_it() -> None:
    model, options = fidelity.mamba(num_hidden_layers=1), adjcomp.Options(host_budget="1GiB")
    with pytest.raises(ValueError, match="the host's own memory"):
        adjcomp.plan(model, None, seq_len=64, options=options)
    with pytest.raises(ValueError, match="this model is on the host"):
        adjcomp.compile(model, options=options)
    with pytest.raises(ValueError, match="has several"):
        adjcomp.plan(model, None, seq_len=64, machine="a100-40gb:2", options=options)
    with pytest.raises(ValueError, match="no byte count"):
        adjcomp.Options(host_budget="much")
    assert replace(profile_device("a100-40gb", name="x")).host_bandwidth == 25e9
