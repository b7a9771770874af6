"""Task graphs and action graphs."""

from __future__ import annotations

import networkx
import pytest
from synthetic import random_stack, regular_stack

from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.taskgraph import task_graph
from adjcomp.ir.tasks import Task, TaskGraph, TaskKind
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule.search import build_plan


def test_the_graph_of_a_stack_has_every_task_and_what_it_waits_for() -> None:
    costs = regular_stack(64, 16, 3)
    graph = task_graph(costs).graph
    kinds = {kind: sum(task.kind is kind for task in graph) for kind in TaskKind}
    assert kinds == {
        TaskKind.FORWARD: 16,
        TaskKind.LOSS: 4,
        TaskKind.RECOMPUTE: 20,
        TaskKind.HEAD_VJP: 4,
        TaskKind.ADJOINT: 16,
        TaskKind.PARAMETER_VJP: 20,
    }
    waits = set(graph.predecessors(Task(TaskKind.ADJOINT, 2, 1)))
    assert waits == {
        Task(TaskKind.ADJOINT, 3, 1),  # g
        Task(TaskKind.ADJOINT, 2, 2),  # the adjoint state
        Task(TaskKind.RECOMPUTE, 2, 1),  # internals
        Task(TaskKind.RECOMPUTE, 1, 1),  # the input
        Task(TaskKind.FORWARD, 2, 0),  # the border
    }
    edge = graph.edges[Task(TaskKind.ADJOINT, 2, 2), Task(TaskKind.ADJOINT, 2, 1)]
    assert edge["bytes"] == costs.layers[2].adjoint_bytes
    assert [str(value) for value in edge["values"]] == ["lam[2,1]"]


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_shorter_than_the_longest_chain_of_its_tasks(seed: int) -> None:
    costs = random_stack(seed, layers=2, chunks=3)
    tasks = task_graph(costs)
    plan = build_plan(costs, emit(costs, [ColumnMode(0)] * 3), 1 << 30, "cpu")
    assert 0 < tasks.critical_seconds() <= plan.seconds


def test_tasks_in_a_circle_are_named() -> None:
    graph = networkx.DiGraph()
    first, second = Task(TaskKind.FORWARD, 1, 0), Task(TaskKind.FORWARD, 2, 0)
    graph.add_edges_from([(first, second), (second, first)])
    with pytest.raises(ValueError, match="forward 1,0 -> forward 2,0"):
        TaskGraph(graph)


def test_the_graph_of_a_plan_has_its_actions_in_an_order_that_runs() -> None:
    costs = random_stack(1, layers=2, chunks=3)
    plan = build_plan(costs, emit(costs, [ColumnMode(0), ColumnMode(1), ColumnMode(2)]), 1 << 30, "cpu")
    assert 0 < plan.task_graph.critical_seconds() < plan.seconds
    graph = plan.graph
    assert graph.number_of_nodes() == len(plan.actions)
    assert networkx.is_directed_acyclic_graph(graph)
    assert all(source < target for source, target in graph.edges)
    assert [graph.nodes[index]["action"] for index in graph] == list(plan.actions)
