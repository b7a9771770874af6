"""Programs that join ranges of time by summaries: parts of a tile's graph and of its VJP's, pruned to halos and linear states.

What a summary doesn't need is gone: gates and outputs of a mixer, with their half of the projections; of the VJP, all gradients
and the recurrence itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.ir.joining import DerivedProgram, JoinPrograms
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.joinable import Joinable, carried_nodes, gradient_of_carry
from adjcomp.passes.joint import JointGraph, differentiate
from adjcomp.passes.narrowing import narrow_products
from adjcomp.passes.programs import lower
from adjcomp.passes.pruning import copied, drop_sizes, drop_unread, prune
from adjcomp.passes.sizes import Target
from adjcomp.passes.split import Split
from adjcomp.passes.summaries import LINEAR_OPS, emit_adjoint_summary, emit_summary


@dataclass(frozen=True)
class DerivedGraph:
    """A pruned graph; arguments and results as those of `DerivedProgram`. accumulate: what is added to accumulators instead."""

    graph: fx.Graph
    results: tuple[fx.Node, ...]
    accumulate: Mapping[fx.Node, list[int]]
    reads: tuple[int, ...]
    reads_outputs: tuple[int, ...]
    saved: tuple[int, ...]
    cotangents: tuple[int, ...]
    carries: tuple[int, ...]
    products: tuple[int, ...]

    def lowered(self, at: Target, name: str) -> DerivedProgram:
        """The program at one length."""
        program = lower(self.graph, at, name, self.results, self.accumulate)
        return DerivedProgram(program, self.reads, self.reads_outputs, self.saved, self.cotangents, self.carries, self.products)


@dataclass(frozen=True)
class JoinGraphs:
    """What `JoinPrograms` has, at any length."""

    template: Joinable
    tail: DerivedGraph | None
    summarize: DerivedGraph | None
    adjoint_summarize: DerivedGraph | None
    tail_vjp: DerivedGraph | None


def join_graphs(template: Joinable, split: Split | None) -> JoinGraphs:
    """The derived graphs of a template whose VJP reads what `split` keeps."""
    tail = _tail(template)
    return JoinGraphs(
        template,
        tail,
        _summarize(template),
        None if split is None else _adjoint_summarize(template, split),
        None if template.joint is None or tail is None else _tail_vjp(template, template.joint),
    )


def join_programs(graphs: JoinGraphs, length: int) -> JoinPrograms:
    """The derived programs for chunks of `length` steps."""
    time, steps = graphs.template.template.time, graphs.template.steps

    def lowered(graph: DerivedGraph | None, name: str, at: int) -> DerivedProgram | None:
        return None if graph is None else graph.lowered(Target(time, at), name)

    return JoinPrograms(
        rules=graphs.template.rules,
        steps=steps,
        tail=lowered(graphs.tail, "tail", steps),
        summarize=lowered(graphs.summarize, "summary", length),
        adjoint_summarize=lowered(graphs.adjoint_summarize, "summary of cotangents", length),
        tail_vjp=lowered(graphs.tail_vjp, "vjp of the tail", steps),
    )


def _results(graph: fx.Graph) -> list[fx.Node]:
    return list(next(n for n in graph.nodes if n.op == "output").args[0])


def _carries(template: Template, graph: fx.Graph) -> list[fx.Node]:
    pairs = zip(_results(graph), template.outputs, strict=True)
    return [node for node, entry in pairs if entry.kind is OutputKind.CARRY]


def _linear(template: Joinable) -> tuple[int, ...]:
    return tuple(i for i, rule in enumerate(template.rules) if rule.is_linear)


def _halos(template: Joinable) -> tuple[int, ...]:
    return tuple(i for i, rule in enumerate(template.rules) if not rule.is_linear)


def _reduce(graph: fx.Graph, results: Sequence[fx.Node]) -> list[int]:
    """Leave what makes the results, and only the columns of products that they read; the positions of placeholders that stay."""
    prune(graph, results)
    narrow_products(graph)
    drop_sizes(graph)
    return drop_unread(graph)


def _running_product(graph: fx.Graph, template: Joinable, carry: int, state: torch.Tensor) -> fx.Node:
    """A placeholder after all others."""
    rule = template.rules[carry]
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        made = graph.placeholder(f"product_{carry}")
    with state.fake_mode:  # type: ignore[attr-defined]
        made.meta["val"] = torch.empty(rule.product_shape, dtype=rule.dtype, device=state.device)
    return made


def _halo_nodes(template: Joinable) -> tuple[fx.Graph, list[fx.Node]]:
    """A copy of the tile in which nothing comes before the chunk, without results, and its outgoing halos."""
    source = template.template.graph.graph
    graph, memo = copied(source)
    for node in carried_nodes(template.template, source):
        if node.target not in LINEAR_OPS:
            memo[node].update_arg(_state_position(node), None)
    carries = _carries(template.template, source)
    return graph, [memo[carries[i]] for i in _halos(template)]


def _state_position(node: fx.Node) -> int:
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index(CARRIED_OPS[node.target].state_argument)


def _tail(template: Joinable) -> DerivedGraph | None:
    if template.steps == 0:
        return None
    graph, halos = _halo_nodes(template)
    reads = _reduce(graph, halos)
    return DerivedGraph(graph, tuple(_results(graph)), {}, tuple(reads), (), (), (), _halos(template), ())


def _summarize(template: Joinable) -> DerivedGraph | None:
    linear = _linear(template)
    if not linear:
        return None
    source = template.template.graph.graph
    graph, memo = copied(source)
    nodes, carries = carried_nodes(template.template, source), [memo[n] for n in _carries(template.template, source)]
    products = {}
    for i in linear:
        state = memo[nodes[i].args[_state_position(nodes[i])]]  # type: ignore[index]
        product = _running_product(graph, template, i, state.meta["val"])
        carries[i], products[i] = emit_summary(graph, memo[nodes[i]], state, product)
    stay = _reduce(graph, [*carries, *(products[i] for i in linear)])
    reads = tuple(i for i in stay if i < len(template.template.inputs))
    return DerivedGraph(graph, tuple(_results(graph)), {}, reads, (), (), (), tuple(range(len(carries))), linear)


def _adjoint_summarize(template: Joinable, split: Split) -> DerivedGraph | None:
    joint = split.joint
    graph, memo = copied(split.backward)
    found, products = {}, {}
    for i in _linear(template):
        gradient = gradient_of_carry(joint, split.backward, i)
        if gradient is not None:
            product = _running_product(graph, template, i, gradient.meta["val"])
            found[i], products[i] = emit_adjoint_summary(graph, memo[gradient.args[0]], product)  # type: ignore[index]
    if not found:
        return None
    stay = _reduce(graph, [*found.values(), *products.values()])
    parts = _sorted(stay, [len(split.reads), len(split.reads_outputs), split.saved, len(joint.cotangents)])
    return DerivedGraph(
        graph,
        tuple(_results(graph)),
        {},
        tuple(split.reads[i] for i in parts[0]),
        tuple(split.reads_outputs[i] for i in parts[1]),
        tuple(parts[2]),
        tuple(joint.cotangents[i] for i in parts[3]),
        tuple(found),
        tuple(products),
    )


def _sorted(positions: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Positions in a row of groups, by group."""
    found, start = [], 0
    for count in counts:
        found.append([p - start for p in positions if start <= p < start + count])
        start += count
    return found


def _tail_vjp(template: Joinable, joint: JointGraph) -> DerivedGraph | None:
    """Differentiate the tail; nothing is kept for it."""
    graph, made = _halo_nodes(template)
    prune(graph, made)
    narrow_products(graph)
    reads = drop_unread(graph)
    whole, halos = template.template, _halos(template)
    outputs = [entry for entry in whole.outputs if entry.kind is OutputKind.CARRY]
    inputs = tuple(whole.inputs[i] for i in reads)
    part = Template(
        fx.GraphModule(torch.nn.Module(), graph), inputs, tuple(outputs[i] for i in halos), whole.time, f"tail of {whole.key}"
    )
    found = differentiate(part)
    if found is None or not found.gradients:
        return None
    graph, memo = copied(found.graph)
    gradients = [memo[n] for n in _results(found.graph)[len(part.outputs) :]]
    prune(graph, gradients)
    drop_sizes(graph)
    parts = _sorted(drop_unread(graph), [len(reads), len(found.cotangents)])
    places = [i for i, entry in enumerate(whole.outputs) if entry.kind is OutputKind.CARRY]
    accumulate: dict[fx.Node, list[int]] = {}
    streams = []
    for node, i in zip(gradients, found.gradients, strict=True):
        if inputs[i].kind is InputKind.STREAM:
            streams.append(node)
        else:
            accumulate.setdefault(node, []).append(joint.gradients.index(reads[i]))
    cotangents = tuple(places[halos[found.cotangents[i]]] for i in parts[1])
    return DerivedGraph(graph, tuple(streams), accumulate, tuple(reads[i] for i in parts[0]), (), (), cotangents, (), ())
