"""The graphs around the tiles: the prologue before the first chunk, the epilogue after the last. Both see the whole sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.cut import is_final_state, is_size, where
from adjcomp.passes.emitting import fake_result
from adjcomp.passes.timeaxis import time_factor
from adjcomp.passes.whole import Whole

aten = torch.ops.aten


def _outside(whole: Whole) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph with the traced graph's placeholders."""
    graph, memo = fx.Graph(), {}
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            memo[node] = graph.node_copy(node)
    return graph, memo


def _copy_into(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: Whole, wanted: Iterable[fx.Node]) -> None:
    """Copy what `wanted` needs, in traced order."""
    needed: set[fx.Node] = set()
    stack = [n for n in wanted if n not in memo]
    while stack:
        node = stack.pop()
        if node in memo or node in needed:
            continue
        if node in whole.cut.activations and not is_size(node):
            raise CaptureError(f"{where(node)}: {node.target} is needed for the whole sequence but belongs to a tile")
        needed.add(node)
        stack.extend(_outside_inputs(node, whole))
    for node in whole.graph.nodes:
        if node in needed and node not in memo:
            memo[node] = _outside_copy(graph, memo, whole, node)


def _outside_inputs(node: fx.Node, whole: Whole) -> list[fx.Node]:
    """A size read off an activation is T times a constant; outside of tiles it is read off an input instead."""
    return [] if _reads_activation_length(node, whole) else list(node.all_input_nodes)


def _reads_activation_length(node: fx.Node, whole: Whole) -> bool:
    return node.target is aten.sym_size.int and node.args[0] in whole.cut.activations and node.args[0].op != "placeholder"  # type: ignore[union-attr]


def _outside_copy(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: Whole, node: fx.Node) -> fx.Node:
    if not _reads_activation_length(node, whole):
        return graph.node_copy(node, lambda a: memo[a])
    factor = time_factor(node.meta["val"], whole.traced.time)
    source, dim = _sequence(whole)
    length = graph.call_function(aten.sym_size.int, (memo[source], dim))
    return length if factor == 1 else graph.call_function(operator.mul, (length, factor))


def _sequence(whole: Whole) -> tuple[fx.Node, int]:
    for node in whole.inputs.values():
        layout = whole.times[node].layout
        if layout is not None:
            return node, layout.dim
    raise CaptureError("no input has a time axis")


def build_prologue(whole: Whole) -> fx.GraphModule:
    """From (parameters, buffers, inputs) to (sides, initial states). What the model changes in forward leaves as a copy."""
    graph, memo = _outside(whole)
    wanted = [*whole.sides, *whole.initial]
    _copy_into(graph, memo, whole, wanted)
    results = [_kept(graph, memo[n]) if n in whole.updated else memo[n] for n in wanted]
    graph.output(tuple(results))
    return fx.GraphModule(whole.traced.graph, graph)


def _kept(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.call_function(aten.clone.default, (node,))
    made.meta["val"] = fake_result(aten.clone.default, (node,), {})
    return made


def build_epilogue(whole: Whole) -> fx.GraphModule:
    """From (parameters, buffers, inputs, sums, outs, final states) to the model's outputs and the values it leaves in
    `updates`.
    """
    graph, memo = _outside(whole)
    totals = [graph.placeholder(f"sum_{i}") for i in range(len(whole.sums))]
    for i, node in enumerate(whole.outs):
        memo[node] = graph.placeholder(f"out_{i}")
    finals = {node.args[0]: graph.placeholder(f"final_{i}") for i, node in enumerate(whole.finals)}
    memo.update({n: finals[n.args[0]] for n in whole.cut.late if is_final_state(n) and n.args[0] in finals})
    length = _total_length(graph, memo, whole)
    for partial, total in zip(whole.sums, totals, strict=True):
        partial.finish(graph, memo, total, length)
    dropped = whole.dropped_outputs()
    outputs = [n for i, n in enumerate(whole.output_nodes()) if i not in dropped]
    wanted = [*outputs, *whole.update_nodes()]
    _copy_into(graph, memo, whole, wanted)
    graph.output(tuple(memo[n] for n in wanted))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return fx.GraphModule(whole.traced.graph, graph)


def _total_length(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: Whole) -> fx.Node:
    source, dim = _sequence(whole)
    return graph.call_function(aten.sym_size.int, (memo[source], dim))
