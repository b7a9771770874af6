"""Residual coupling leaves no path from one layer's VJP to another's: in the task graph, on one device, and on several."""

from __future__ import annotations

import fidelity
import generated
import networkx as nx
import pytest
import torch
from torch import nn

import adjcomp
from adjcomp.ir.actions import Adjoint
from adjcomp.ir.plan import Plan
from adjcomp.ir.taskgraph import task_graph
from adjcomp.ir.tasks import TaskKind
from adjcomp.ir.transfers import Send
from adjcomp.ir.values import Kind

pytestmark = pytest.mark.filterwarnings("ignore::adjcomp.variants.ApproximationWarning")
LAYERS = 4


def make_plan(coupling: str, devices: int = 1, budget: int | None = None, streams: int = 1) -> Plan:
    torch.manual_seed(0)
    blocks = [generated.GeneratedBlock(generated.BlockSpec("diagonal"), 4) for _ in range(LAYERS)]
    model: nn.Module = fidelity.Residual(blocks, 4)
    return adjcomp.plan(
        model,
        budget,
        seq_len=32,
        example_inputs=(torch.zeros(1, 32, dtype=torch.int64),),
        machine="a100-40gb" if devices == 1 else f"a100-40gb:{devices}",
        chunk=8,
        coupling=coupling,
        options=adjcomp.Options(placement="layers" if devices > 1 else None, solver_time_limit_seconds=0.0, streams=streams),
    )


def test_layers_do_not_wait_for_each_other() -> None:
    """Given residual coupling, then no adjoint task of a layer is reached from one of another layer, the head's apart."""
    for coupling, waits in (("exact", True), ("residual", False)):
        plan = make_plan(coupling)
        graph = task_graph(plan.costs).graph
        adjoints = [t for t in graph.nodes if t.kind is TaskKind.ADJOINT and 0 < t.layer < plan.costs.head]
        crossing = [(a, b) for a in adjoints for b in nx.descendants(graph, a) if b in adjoints and b.layer != a.layer]
        assert bool(crossing) is waits


def test_every_vjp_of_one_device_reads_the_cotangent_of_the_streams_end() -> None:
    """Given residual coupling, then the plan is verified and its adjoints read g[K,c] and write no g."""
    plan = make_plan("residual")
    plan.verify()
    assert plan.costs.shares_cotangent
    for action in plan.actions:
        if isinstance(action, Adjoint):
            assert {v.layer for v in action.reads(plan.costs) if v.kind is Kind.COTANGENT} == {LAYERS}
            assert not any(v.kind is Kind.COTANGENT for v in action.writes(plan.costs))


def test_devices_hand_only_the_streams_cotangent_on() -> None:
    """Given layers on several devices, then what goes down in the backward is dl/dy_K alone, and it is no slower than exact."""
    exact, residual = make_plan("exact", 2), make_plan("residual", 2)
    for plan in (exact, residual):
        plan.verify()
    sent = {a.value.layer for a in residual.actions if isinstance(a, Send) and a.value.kind is Kind.COTANGENT}
    assert sent == {LAYERS}
    assert any(isinstance(a, Send) and a.value.kind is Kind.COTANGENT and a.value.layer < LAYERS for a in exact.actions)
    assert residual.seconds <= exact.seconds


def test_vjps_of_one_chunk_run_on_streams_side_by_side() -> None:
    """Given residual coupling and streams, then a chunk's VJPs are spread over them as the budget allows."""
    one = make_plan("residual")
    plan = make_plan("residual", streams=3)
    plan.verify()
    assert {a.stream for a in plan.actions if isinstance(a, Adjoint)} == {0, 1, 2}
    assert plan.seconds == one.seconds
    assert "streams  up to 3 side by side" in str(plan)
    tight = make_plan("residual", budget=max(one.peak_bytes.values()), streams=3)
    tight.verify()
    assert max(tight.peak_bytes.values()) <= max(one.peak_bytes.values())


@pytest.mark.parametrize("budget", [None, "20KiB"])
def test_streams_change_no_gradient(budget: str | None) -> None:
    """Given a step on several streams, then its gradients are those on one, bit for bit."""
    torch.manual_seed(0)
    blocks = [generated.GeneratedBlock(generated.BlockSpec("diagonal"), 4) for _ in range(LAYERS)]
    model: nn.Module = fidelity.Residual(blocks, 4)
    ids = torch.randint(0, 4, (1, 30))
    found = []
    for streams in (1, 3):
        options = adjcomp.Options(streams=streams)
        compiled = adjcomp.compile(model, budget, chunk=8, coupling="residual", options=options)
        model.zero_grad()
        compiled(ids).square().sum().backward()
        compiled.plan.verify()
        assert any(a.stream for a in compiled.plan.actions) is (streams > 1)
        assert compiled.stats.measured_peak_bytes <= compiled.stats.budget_bytes
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_streams_need_the_residual_form() -> None:
    with pytest.raises(ValueError, match="streams=2 needs coupling='residual'"):
        make_plan("exact", streams=2)
    with pytest.raises(ValueError, match="streams must be at least 1"):
        adjcomp.Options(streams=0)
    with pytest.raises(TypeError, match="streams must be a number"):
        adjcomp.Options(streams="two")  # type: ignore[arg-type]
