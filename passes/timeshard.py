"""Time sharding: from a traced model to a ResidualStack of tile functions, with what stands around them.

The prologue makes what tiles read from the side (shifted labels, masks) and initial states, for the whole sequence at once; the
epilogue finishes the model's outputs from partial sums and per-token outputs. Both run under plain autograd.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.ir.stack import (
    CarryInfo,
    InputKind,
    Layer,
    OutInfo,
    OutputKind,
    ResidualStack,
    SideInfo,
    SumInfo,
    Template,
    TileInput,
    TileOutput,
    TimeAxis,
)
from adjcomp.passes.capture import TracedModel
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.cleanup import clean
from adjcomp.passes.cut import Cut, find_cut, is_final_state, is_loss_share, is_size, where
from adjcomp.passes.reductions import Partial, partial_sum
from adjcomp.passes.template import template_key
from adjcomp.passes.tilegraph import TileGraph, state_argument
from adjcomp.passes.timeanalysis import analyse_time
from adjcomp.passes.timeaxis import NodeTime, TimeLayout, time_factor

aten = torch.ops.aten


@dataclass(frozen=True)
class Trainable:
    """What wants a gradient: names of parameters, and paths of input tensors."""

    parameters: frozenset[str]
    inputs: frozenset[str]


@dataclass
class _Whole:
    """The traced graph, analysed, and the whole-sequence values found while tiles are built."""

    traced: TracedModel
    graph: fx.Graph
    state: dict[str, fx.Node]  # parameter and buffer placeholders by placeholder name
    state_names: dict[str, str]  # placeholder name -> parameter or buffer name
    inputs: dict[str, fx.Node]  # input placeholders by path
    times: dict[fx.Node, NodeTime]
    cut: Cut
    grad_nodes: frozenset[fx.Node]
    sides: list[fx.Node] = field(default_factory=list)
    initial: list[fx.Node] = field(default_factory=list)
    finals: list[fx.Node] = field(default_factory=list)
    outs: list[fx.Node] = field(default_factory=list)
    sums: list[Partial] = field(default_factory=list)


def shard(traced: TracedModel, trainable: Trainable) -> ResidualStack:
    """Cut a traced model into tile functions. Raises CaptureError naming module, op and source line of what cannot be cut."""
    whole = _analyse(traced, trainable)
    _find_outputs(whole)
    tiles = [_tile(whole, k) for k in range(len(whole.cut.borders) + 1)]
    layers, templates = _layers(whole, tiles)
    return ResidualStack(
        layers=layers,
        templates=templates,
        sides=tuple(SideInfo(_axis(whole.times[n].layout), n in whole.grad_nodes) for n in whole.sides),
        outs=tuple(_out_info(n, whole) for n in whole.outs),
        sums=tuple(SumInfo(tuple(p.shape), p.dtype) for p in whole.sums),
        prologue=_prologue(whole),
        epilogue=_epilogue(whole),
        initial_count=len(whole.initial),
        final_count=len(whole.finals),
        dropped_outputs=_dropped(whole),
        placeholder_names=(*traced.parameter_names, *traced.buffer_names, *(i.path for i in traced.inputs)),
    )


def _analyse(traced: TracedModel, trainable: Trainable) -> _Whole:
    graph = clean(traced.graph.graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    names = (*traced.parameter_names, *traced.buffer_names)
    state, inputs = placeholders[: len(names)], placeholders[len(names) :]
    layouts: dict[fx.Node, TimeLayout | None] = dict.fromkeys(state)
    layouts.update({n: None if i.time_dim is None else TimeLayout(i.time_dim) for n, i in zip(inputs, traced.inputs, strict=True)})
    times = analyse_time(graph, traced.time, layouts)
    by_path = {i.path: n for n, i in zip(inputs, traced.inputs, strict=True)}
    weights = [n for n in state if n.meta["val"].is_floating_point() or n.meta["val"].is_complex()]
    main = _main_input(by_path, times)
    cut = find_cut(graph, times, [*weights, *([main] if main is not None else [])])
    wanted = [n for n, name in zip(state, names, strict=True) if name in trainable.parameters]
    wanted += [by_path[path] for path in trainable.inputs if path in by_path]
    return _Whole(
        traced=traced,
        graph=graph,
        state={n.name: n for n in state},
        state_names={n.name: name for n, name in zip(state, names, strict=True)},
        inputs=by_path,
        times=times,
        cut=cut,
        grad_nodes=_grad_nodes(graph, wanted),
    )


def _main_input(inputs: dict[str, fx.Node], times: dict[fx.Node, NodeTime]) -> fx.Node | None:
    """The float sequence that the model transforms, where it has one: the first (B, T, …) float input of three dimensions, else of two."""
    sequences = [n for n in inputs.values() if times[n].layout is not None and n.meta["val"].is_floating_point()]
    wide = [n for n in sequences if n.meta["val"].ndim >= 3]
    integers = [n for n in inputs.values() if not n.meta["val"].is_floating_point()]
    if wide:
        return wide[0]
    return sequences[0] if sequences and not integers else None


def _grad_nodes(graph: fx.Graph, wanted: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Nodes through which a wanted gradient flows: float values computed from what wants one, outside of no_grad."""
    found = set(wanted)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("no_grad") or node.target is aten.detach.default:
            continue
        value = node.meta.get("val")
        single = isinstance(value, torch.Tensor)
        if single and not (value.is_floating_point() or value.is_complex()):
            continue
        if (single or isinstance(value, tuple | list)) and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _output_nodes(graph: fx.Graph) -> list[fx.Node]:
    return list(next(n for n in graph.nodes if n.op == "output").args[0])  # type: ignore[arg-type]


def _find_outputs(whole: _Whole) -> None:
    """Decide what tiles hand to the epilogue: partial sums where an op reduces over time, per-token outputs for the rest."""
    cut, dropped = whole.cut, _dropped(whole)
    for node in whole.graph.nodes:
        if node in cut.late and node.op == "call_function":
            _late_sources(whole, node)
    for i, node in enumerate(_output_nodes(whole.graph)):
        if i not in dropped and node in cut.activations:
            _add_out(whole, node)


def _late_sources(whole: _Whole, node: fx.Node) -> None:
    if is_final_state(node):
        whole.finals.append(node)
    elif is_loss_share(node):
        whole.sums.append(Partial.read(node))
    elif any(a in whole.cut.activations for a in node.all_input_nodes) and not _is_read_of_late(node, whole):
        partials = partial_sum(node, whole.traced.time)
        if partials is not None:
            whole.sums.extend(partials)
            return
        for source in node.all_input_nodes:
            if source in whole.cut.activations:
                _add_out(whole, source)


def _is_read_of_late(node: fx.Node, whole: _Whole) -> bool:
    return node.target is operator.getitem and node.args[0] in whole.cut.late


def _add_out(whole: _Whole, node: fx.Node) -> None:
    if node not in whole.cut.home:
        raise CaptureError(f"{where(node)}: an output combines several points of the residual stream in {node.target}; return them separately")
    if node not in whole.outs:
        whole.outs.append(node)


def _dropped(whole: _Whole) -> frozenset[int]:
    """Outputs that are the logits behind a loss which is itself an output: they are not materialised."""
    from adjcomp.passes.cleanup import logits_of_losses

    hidden = logits_of_losses(whole.graph)
    return frozenset(i for i, n in enumerate(_output_nodes(whole.graph)) if n in hidden)


@dataclass(frozen=True)
class _Tile:
    graph: TileGraph
    outs: tuple[int, ...]
    sums: tuple[int, ...]


def _tile(whole: _Whole, index: int) -> _Tile:
    cut = whole.cut
    tile = TileGraph(index, cut, whole.times, whole.state, whole.traced.time)
    if index < len(cut.borders):
        tile.output(OutputKind.STREAM, cut.borders[index])
    outs = tuple(i for i, n in enumerate(whole.outs) if cut.home[n] == index)
    for i in outs:
        tile.output(OutputKind.OUT, whole.outs[i])
    sums = tuple(i for i, p in enumerate(whole.sums) if cut.home[p.source] == index)
    for i in sums:
        whole.sums[i].emit(tile)
    for node in whole.finals:
        if cut.home[node.args[0]] == index and node.args[0] not in tile.carried:  # type: ignore[index]
            tile.fetch(node.args[0])  # type: ignore[arg-type]
    return _Tile(tile, outs, sums)


def _layers(whole: _Whole, tiles: list[_Tile]) -> tuple[tuple[Layer, ...], tuple[Template, ...]]:
    layers: list[Layer] = []
    templates: list[Template] = []
    stream_wanted = False
    for tile in tiles:
        template, needs = _finish(whole, tile, stream_wanted)
        known = [t.key for t in templates]
        if template.key not in known:
            templates.append(template)
            known.append(template.key)
        layers.append(_bind(whole, tile, known.index(template.key), len(tiles)))
        stream_wanted = needs
    return tuple(layers), tuple(templates)


_ORDER = (InputKind.PARAMETER, InputKind.STREAM, InputKind.SIDE, InputKind.CARRY, InputKind.SEED, InputKind.OFFSET)


def _finish(whole: _Whole, tile: _Tile, stream_wanted: bool) -> tuple[Template, bool]:
    """Fix the order of placeholders and outputs, and which gradients are wanted; the second result: does g[k,c] matter above."""
    built = tile.graph
    wanted = {kind: [n in whole.grad_nodes for n in built.inputs[kind]] for kind in (InputKind.PARAMETER, InputKind.SIDE)}
    needs = stream_wanted or any(wanted[InputKind.PARAMETER]) or any(wanted[InputKind.SIDE]) or _initial_wanted(whole, built)
    wanted[InputKind.STREAM] = [stream_wanted] * len(built.placeholders[InputKind.STREAM])
    wanted[InputKind.CARRY] = [needs and n.meta["val"].dtype.is_floating_point | n.meta["val"].dtype.is_complex for n in built.placeholders[InputKind.CARRY]]
    inputs, order = [], []
    for kind in _ORDER:
        for i, placeholder in enumerate(built.placeholders[kind]):
            inputs.append(TileInput(kind, i, wanted.get(kind, [False] * (i + 1))[i]))
            order.append(placeholder)
    _reorder(built.graph, order)
    counts: dict[OutputKind, int] = {}
    outputs, nodes = [], []
    for kind in OutputKind:
        for result_kind, node in built.results:
            if result_kind is kind:
                floating = node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.is_complex
                outputs.append(TileOutput(kind, counts.get(kind, 0), floating and needs))
                counts[kind] = counts.get(kind, 0) + 1
                nodes.append(node)
    built.graph.output(tuple(nodes))
    module = fx.GraphModule(torch.nn.Module(), built.graph)
    return Template(module, tuple(inputs), tuple(outputs), whole.traced.time, template_key(built.graph, inputs, outputs)), needs


def _initial_wanted(whole: _Whole, built: TileGraph) -> bool:
    return any(state_argument(n) in whole.grad_nodes for n in built.carried)


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    for placeholder in reversed(order):
        first = next(iter(graph.nodes))
        if first is not placeholder:
            first.prepend(placeholder)


def _bind(whole: _Whole, tile: _Tile, template: int, count: int) -> Layer:
    built = tile.graph
    sides = tuple(_index(whole.sides, n) for n in built.inputs[InputKind.SIDE])
    return Layer(
        name=_layer_name(built, count),
        template=template,
        parameters=tuple(whole.state_names[n.name] for n in built.inputs[InputKind.PARAMETER]),
        sides=sides,
        carries=tuple(_carry_info(whole, n) for n in built.carried),
        outs=tile.outs,
        sums=tile.sums,
    )


def _index(values: list[fx.Node], node: fx.Node) -> int:
    if node not in values:
        values.append(node)
    return values.index(node)


def _carry_info(whole: _Whole, node: fx.Node) -> CarryInfo:
    state = node.meta["val"][CARRIED_OPS[node.target].state_output]
    start = state_argument(node)
    if start is not None and start in whole.cut.late:
        raise CaptureError(f"{where(node)}: its initial state is computed from the whole sequence")
    final = next((i for i, n in enumerate(whole.finals) if n.args[0] is node), None)
    initial = None if start is None else _index(whole.initial, start)
    return CarryInfo(tuple(int(s) for s in state.shape), state.dtype, initial, final)


def _layer_name(built: TileGraph, count: int) -> str:
    """The common module path of the tile's ops."""
    if built.index == 0:
        return "stem"
    if built.index == count - 1:
        return "head"
    paths = {str(n.meta["where"]).split(" (")[0] for n in built.graph.nodes if n.op == "call_function" and "where" in n.meta}
    parts = [p.split(".") for p in paths if p != "the root module"]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) != 1:
            break
        common.append(names[0])
    return ".".join(common) if any(p.isdigit() for p in common) else f"layer {built.index}"


def _axis(layout: TimeLayout | None) -> TimeAxis | None:
    return None if layout is None else TimeAxis(layout.dim, layout.outer, layout.inner)


def _out_info(node: fx.Node, whole: _Whole) -> OutInfo:
    layout = whole.times[node].layout
    value = node.meta["val"]
    shape = tuple(None if time_factor(s, whole.traced.time) else int(s) for s in value.shape)
    assert layout is not None
    return OutInfo(shape, value.dtype, TimeAxis(layout.dim, layout.outer, layout.inner))


def _outside(whole: _Whole) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph with the traced graph's placeholders."""
    graph, memo = fx.Graph(), {}
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            memo[node] = graph.node_copy(node)
    return graph, memo


def _copy_into(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: _Whole, wanted: Iterable[fx.Node]) -> None:
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


def _outside_inputs(node: fx.Node, whole: _Whole) -> list[fx.Node]:
    """A size read off an activation is T times a constant; outside of tiles it is read off an input instead."""
    return [] if _reads_activation_length(node, whole) else list(node.all_input_nodes)


def _reads_activation_length(node: fx.Node, whole: _Whole) -> bool:
    return node.target is aten.sym_size.int and node.args[0] in whole.cut.activations and node.args[0].op != "placeholder"  # type: ignore[union-attr]


def _outside_copy(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: _Whole, node: fx.Node) -> fx.Node:
    if not _reads_activation_length(node, whole):
        return graph.node_copy(node, lambda a: memo[a])
    factor = time_factor(node.meta["val"], whole.traced.time)
    source, dim = _sequence(whole)
    length = graph.call_function(aten.sym_size.int, (memo[source], dim))
    return length if factor == 1 else graph.call_function(operator.mul, (length, factor))


def _sequence(whole: _Whole) -> tuple[fx.Node, int]:
    for node in whole.inputs.values():
        layout = whole.times[node].layout
        if layout is not None:
            return node, layout.dim
    raise CaptureError("no input has a time axis")


def _prologue(whole: _Whole) -> fx.GraphModule:
    graph, memo = _outside(whole)
    wanted = [*whole.sides, *whole.initial]
    _copy_into(graph, memo, whole, wanted)
    graph.output(tuple(memo[n] for n in wanted))
    return fx.GraphModule(torch.nn.Module(), graph)


def _epilogue(whole: _Whole) -> fx.GraphModule:
    graph, memo = _outside(whole)
    totals = [graph.placeholder(f"sum_{i}") for i in range(len(whole.sums))]
    for i, node in enumerate(whole.outs):
        memo[node] = graph.placeholder(f"out_{i}")
    for i, node in enumerate(whole.finals):
        memo[node] = graph.placeholder(f"final_{i}")
    length = _total_length(graph, memo, whole)
    for partial, total in zip(whole.sums, totals, strict=True):
        partial.finish(graph, memo, total, length)
    dropped = _dropped(whole)
    outputs = [n for i, n in enumerate(_output_nodes(whole.graph)) if i not in dropped]
    _copy_into(graph, memo, whole, outputs)
    graph.output(tuple(memo[n] for n in outputs))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return fx.GraphModule(torch.nn.Module(), graph)


def _total_length(graph: fx.Graph, memo: dict[fx.Node, fx.Node], whole: _Whole) -> fx.Node:
    source, dim = _sequence(whole)
    return graph.call_function(aten.sym_size.int, (memo[source], dim))
