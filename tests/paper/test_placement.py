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
from adjcomp.ir.tasks import TaskKind
from adjcomp.ir.transfers import Send
from adjcomp.ir.values import Kind
from adjcomp.passes.taskgraph import task_graph

pytestmark = pytest.mark.filterwarnings("ignore::adjcomp.variants.ApproximationWarning")
LAYERS = 4


def make_plan(coupling: str, devices: int = 1, budget: int | None = None) -> Plan:
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
        options=adjcomp.Options(placement="layers" if devices > 1 else None, solver_time_limit_seconds=0.0),
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
