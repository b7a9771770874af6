"""Tiles of a whole graph: their functions, what these are bound to, and which of them are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.ir.stack import CarryInfo, InputKind, Layer, OutputKind, StoreInfo, Template, TileInput, TileOutput
from adjcomp.ir.variant import Coupling, Variant
from adjcomp.passes.adjoint_window import RECURRENCES, check_no_attention, check_recurrences, windowed_shape
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.coupling import detach_branches
from adjcomp.passes.cut import where
from adjcomp.passes.template import template_key
from adjcomp.passes.tilegraph import TileGraph, state_argument
from adjcomp.passes.whole import Whole


@dataclass(frozen=True)
class Tile:
    """A tile function, and which of the whole graph's outs and sums it makes."""

    graph: TileGraph
    outs: tuple[int, ...]
    sums: tuple[int, ...]


def build_tile(whole: Whole, index: int) -> Tile:
    """The tile function of layer `index`: 0 is the stem, the last one the head."""
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
    return Tile(tile, outs, sums)


def bind_layers(whole: Whole, tiles: list[Tile], variant: Variant) -> tuple[tuple[Layer, ...], tuple[Template, ...]]:
    """Layers, and the templates that equal ones share."""
    layers: list[Layer] = []
    templates: list[Template] = []
    _check_draws(tiles)
    if variant.coupling is Coupling.RESIDUAL:
        for tile in tiles[1:-1]:
            _decouple(tile.graph, len(tiles))
    if variant.adjoint_window is not None:
        check_recurrences((n for tile in tiles for n in tile.graph.carried), variant.adjoint_window)
        check_no_attention((n for tile in tiles for n in tile.graph.stored), variant.adjoint_window)
    stream_wanted = False
    for tile in tiles:
        template, needs = _finish(whole, tile, stream_wanted, variant.adjoint_window)
        known = [t.key for t in templates]
        if template.key not in known:
            templates.append(template)
            known.append(template.key)
        layers.append(_bind(whole, tile, templates[known.index(template.key)], known.index(template.key), len(tiles)))
        stream_wanted = needs
    return tuple(layers), tuple(templates)


def _decouple(built: TileGraph, count: int) -> None:
    """Make the branches of a layer read their input as a constant."""
    stream = next(node for kind, node in built.results if kind is OutputKind.STREAM)
    detach_branches(built.graph, built.placeholders[InputKind.STREAM][0], stream, _layer_name(built, count))


def _check_draws(tiles: list[Tile]) -> None:
    """A random value beside the residual stream that several layers read would be drawn anew in each."""
    seen: set[fx.Node] = set()
    for node in (n for tile in tiles for n in tile.graph.drawn):
        if node in seen:
            raise CaptureError(
                f"{where(node)}: {node.target} draws numbers that several layers read; draw them inside of each layer"
            )
        seen.add(node)


_ORDER = (
    InputKind.PARAMETER,
    InputKind.STREAM,
    InputKind.SIDE,
    InputKind.CARRY,
    InputKind.PAST,
    InputKind.SEED,
    InputKind.OFFSET,
)


def _finish(whole: Whole, tile: Tile, stream_wanted: bool, window: int | None) -> tuple[Template, bool]:
    """Fix the order of placeholders and outputs, and which gradients are wanted; the second result: does g[k,c] matter above."""
    built = tile.graph
    wanted = {kind: [n in whole.grad_nodes for n in built.inputs[kind]] for kind in (InputKind.PARAMETER, InputKind.SIDE)}
    needs = stream_wanted or any(wanted[InputKind.PARAMETER]) or any(wanted[InputKind.SIDE]) or _initial_wanted(whole, built)
    wanted[InputKind.STREAM] = [stream_wanted] * len(built.placeholders[InputKind.STREAM])
    wanted[InputKind.CARRY] = [needs and _is_continuous(n) for n in built.placeholders[InputKind.CARRY]]
    wanted[InputKind.PAST] = [needs and n in whole.grad_nodes for n in built.stored]
    inputs, order = [], []
    for kind in _ORDER:
        for i, placeholder in enumerate(built.placeholders[kind]):
            inputs.append(TileInput(kind, i, wanted.get(kind, [False] * (i + 1))[i]))
            order.append(placeholder)
    _reorder(built.graph, order)
    counts: dict[OutputKind, int] = {}
    outputs, nodes = [], []
    for wanted_kind in OutputKind:
        for result_kind, node in built.results:
            if result_kind is wanted_kind:
                index = counts.get(wanted_kind, 0)
                takes = wanted[InputKind.PAST][index] if wanted_kind is OutputKind.STORED else needs and _is_continuous(node)
                outputs.append(TileOutput(wanted_kind, index, takes))
                counts[wanted_kind] = index + 1
                nodes.append(node)
    built.graph.output(tuple(nodes))
    built.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    module = fx.GraphModule(torch.nn.Module(), built.graph)
    key = template_key(built.graph, inputs, outputs, window)
    return Template(module, tuple(inputs), tuple(outputs), whole.traced.time, key, window), needs


def _is_continuous(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _initial_wanted(whole: Whole, built: TileGraph) -> bool:
    return any(whole.states_wanted or state_argument(n) in whole.grad_nodes for n in built.carried)


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    for placeholder in reversed(order):
        first = next(iter(graph.nodes))
        if first is not placeholder:
            first.prepend(placeholder)


def _bind(whole: Whole, tile: Tile, template: Template, number: int, count: int) -> Layer:
    built = tile.graph
    takes = [entry.differentiable for entry in template.outputs if entry.kind is OutputKind.STORED]
    sides = tuple(_index(whole.sides, n) for n in built.inputs[InputKind.SIDE])
    return Layer(
        name=_layer_name(built, count),
        template=number,
        parameters=tuple(whole.state_names[n.name] for n in built.inputs[InputKind.PARAMETER]),
        sides=sides,
        carries=tuple(_carry_info(whole, n, template.window) for n in built.carried),
        outs=tile.outs,
        sums=tile.sums,
        stores=tuple(_store_info(n, wanted) for n, wanted in zip(built.stored, takes, strict=True)),
    )


def _index(values: list[fx.Node], node: fx.Node) -> int:
    if node not in values:
        values.append(node)
    return values.index(node)


def _carry_info(whole: Whole, node: fx.Node, window: int | None) -> CarryInfo:
    state = node.meta["val"][CARRIED_OPS[node.target].state_output]
    start = state_argument(node)
    if start is not None and start in whole.cut.late:
        raise CaptureError(f"{where(node)}: its initial state is computed from the whole sequence")
    final = next((i for i, n in enumerate(whole.finals) if n.args[0] is node), None)
    initial = None if start is None else _index(whole.initial, start)
    windowed = windowed_shape(node, window) if window is not None and node.target in RECURRENCES else None
    return CarryInfo(tuple(int(s) for s in state.shape), state.dtype, initial, final, windowed)


def _store_info(node: fx.Node, wanted: bool) -> StoreInfo:
    value = node.meta["val"]
    batch, _, *sizes = value.shape
    return StoreInfo(int(batch), tuple(int(s) for s in sizes), value.dtype, wanted)


def _layer_name(built: TileGraph, count: int) -> str:
    """The common module path of the tile's ops on the stream; what is computed from the side may be another module's."""
    if built.index == 0:
        return "stem"
    if built.index == count - 1:
        return "head"
    reached = set(built.placeholders[InputKind.STREAM])
    for node in built.graph.nodes:
        if any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    paths = {str(n.meta["where"]).split(" (")[0] for n in reached if n.op == "call_function" and "where" in n.meta}
    parts = [p.split(".") for p in paths if p != "the root module"]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) != 1:
            break
        common.append(names[0])
    return ".".join(common) if any(p.isdigit() for p in common) else f"layer {built.index}"
