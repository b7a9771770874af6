"""The tasks of a step over (layer, chunk) tiles, with what they hand to each other, before anything is decided.

Nothing is assumed to be kept: every internal comes from a recompute task, which a plan drops where it holds the internals from
the forward. The VJP of a tile is one fused task here, named by what others wait for (the adjoint state and the cotangent); the
parameter VJP hangs behind it at no cost of its own, because the fused adjoint computes it.
"""

from __future__ import annotations

import networkx

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.tasks import Task, TaskGraph, TaskKind
from adjcomp.ir.values import Value, adjoint, carry, cotangent, has_adjoint, has_carry, keep, stream, value_bytes


def task_graph(costs: StackCosts) -> TaskGraph:
    """The TaskGraph of `costs`."""
    graph = networkx.DiGraph()
    for chunk in range(costs.chunk_count):
        for layer in range(costs.head + 1):
            _add_forward(graph, costs, layer, chunk)
    for chunk in range(costs.chunk_count - 1, -1, -1):
        for layer in range(costs.head, -1, -1):
            if costs.tile(layer, chunk).has_vjp:
                _add_backward(graph, costs, layer, chunk)
    return TaskGraph(graph)


def forward_task(costs: StackCosts, layer: int, chunk: int) -> Task:
    """The task that runs tile (layer, chunk) first."""
    return Task(TaskKind.LOSS if layer == costs.head else TaskKind.FORWARD, layer, chunk)


def adjoint_task(costs: StackCosts, layer: int, chunk: int) -> Task:
    """The task that runs the VJP of tile (layer, chunk)."""
    return Task(TaskKind.HEAD_VJP if layer == costs.head else TaskKind.ADJOINT, layer, chunk)


def _add_forward(graph: networkx.DiGraph, costs: StackCosts, layer: int, chunk: int) -> None:
    """The forward and the recompute of a tile."""
    tile = costs.tile(layer, chunk)
    forward, again = forward_task(costs, layer, chunk), Task(TaskKind.RECOMPUTE, layer, chunk)
    graph.add_node(forward, seconds=tile.forward_seconds, flops=tile.forward_flops, workspace_bytes=tile.forward_workspace_bytes)
    graph.add_node(again, seconds=tile.keep_seconds, flops=tile.forward_flops, workspace_bytes=tile.keep_workspace_bytes)
    if layer > 0:
        _edge(graph, costs, forward_task(costs, layer - 1, chunk), forward, stream(layer - 1, chunk))
        _edge(graph, costs, Task(TaskKind.RECOMPUTE, layer - 1, chunk), again, stream(layer - 1, chunk))
    if chunk > 0 and has_carry(tile):
        for task in (forward, again):
            _edge(graph, costs, forward_task(costs, layer, chunk - 1), task, carry(layer, chunk - 1))
    if layer == costs.head and chunk > 0:  # the sums of the loss are added up in order
        _edge(graph, costs, forward_task(costs, layer, chunk - 1), forward)


def _add_backward(graph: networkx.DiGraph, costs: StackCosts, layer: int, chunk: int) -> None:
    """The VJP of a tile, and its addition to the parameters' gradients."""
    tile, last = costs.tile(layer, chunk), costs.chunk_count - 1
    task, parameters = adjoint_task(costs, layer, chunk), Task(TaskKind.PARAMETER_VJP, layer, chunk)
    graph.add_node(task, seconds=tile.adjoint_seconds, flops=tile.adjoint_flops, workspace_bytes=tile.adjoint_workspace_bytes)
    graph.add_node(parameters, seconds=0.0, flops=0, workspace_bytes=0)
    graph.add_edge(task, parameters, values=(), bytes=0)
    _edge(graph, costs, Task(TaskKind.RECOMPUTE, layer, chunk), task, keep(layer, chunk))
    if tile.reads_input and layer > 0:
        _edge(graph, costs, Task(TaskKind.RECOMPUTE, layer - 1, chunk), task, stream(layer - 1, chunk))
    if tile.reads_output and layer < costs.head:
        _edge(graph, costs, Task(TaskKind.RECOMPUTE, layer, chunk), task, stream(layer, chunk))
    if tile.reads_carry and has_carry(tile) and chunk > 0:
        _edge(graph, costs, forward_task(costs, layer, chunk - 1), task, carry(layer, chunk - 1))
    if layer == costs.head:  # the cotangent of the loss is known once the forward is over
        _edge(graph, costs, forward_task(costs, layer, last), task)
    else:
        source = costs.cotangent_of(layer)
        _edge(graph, costs, adjoint_task(costs, source + 1, chunk), task, cotangent(source, chunk))
    if chunk < last and has_adjoint(tile):
        _edge(graph, costs, adjoint_task(costs, layer, chunk + 1), task, adjoint(layer, chunk))


def _edge(graph: networkx.DiGraph, costs: StackCosts, source: Task, target: Task, *values: Value) -> None:
    """`target` waits for `source`, for `values` among others."""
    known = graph.edges[source, target]["values"] if graph.has_edge(source, target) else ()
    together = (*known, *values)
    graph.add_edge(source, target, values=together, bytes=sum(value_bytes(costs, value) for value in together))
