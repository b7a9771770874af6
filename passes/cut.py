"""Find the residual stack in a traced graph, by dataflow alone.

The activations (values that depend both on the sequence and on a parameter or the main input) form a DAG from the stem to the
loss. A node that
every path passes is a place where the model can be cut: a dominator of the end. Of those, the borders are the ones at which a
layer starts or ends: a segment with a recurrence in it, or one that forks and multiplies by a weight (a residual block).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.carried import ATTENTION, CARRIED_OPS, LINEAR_CROSS_ENTROPY
from adjcomp.passes.timeaxis import Locality, NodeTime, TimeLayout, value_of

aten = torch.ops.aten
_CONTRACTIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    torch.ops.adjcomp.grouped_linear.default,
}
_SELECTIONS = ("select", "slice", "index_select", "gather", "index", "cat", "stack", "constant_pad_nd")
_REDUCTIONS = (
    "sum",
    "mean",
    "nll_loss_forward",
    "amax",
    "amin",
    "max",
    "min",
    "logsumexp",
    "var",
    "std",
    "linalg_vector_norm",
    "norm",
    "any",
    "histc",
    "all",
)
LATE_OPS = {getattr(aten, name) for name in (*_SELECTIONS, *_REDUCTIONS)}
_START = "start"


@dataclass(frozen=True)
class Cut:
    """The stack's borders and where every activation lives.

    borders: x[0] … x[K], nodes of shape (B, T, …) with time in dimension 1. home: tile index of each activation inside a tile.
    main: everything computed from the value in which the residual stream begins; the rest is made where it is read, in tiles or
    around
    them. late: nodes of main that need the whole sequence of some activation; activations: the others that have time.
    """

    borders: tuple[fx.Node, ...]
    home: dict[fx.Node, int]
    main: frozenset[fx.Node]
    late: frozenset[fx.Node]
    activations: frozenset[fx.Node]


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number read off a shape, which depends on no value."""
    return not isinstance(value_of(node), torch.Tensor | tuple | list)


def where(node: fx.Node) -> str:
    """Module path and source line of a node, for error messages."""
    return str(node.meta.get("where", "the root module"))


def is_final_state(node: fx.Node) -> bool:
    """Whether a node reads the outgoing state of a recurrence."""
    source = node.args[0] if node.args else None
    spec = CARRIED_OPS.get(source.target) if isinstance(source, fx.Node) else None
    return spec is not None and len(node.args) > 1 and bool(node.args[1] == spec.state_output)


def is_loss_share(node: fx.Node) -> bool:
    """Whether a node reads the loss sum or the count of the chunked cross-entropy."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is LINEAR_CROSS_ENTROPY


def find_cut(graph: fx.Graph, times: dict[fx.Node, NodeTime], weights: Iterable[fx.Node]) -> Cut:
    """Cut `graph`; `weights` are the placeholders whose dependents count as activations once they touch time.

    Raises CaptureError where an activation mixes time in a way no tile can, or where no layer is found.
    """
    flow = find_flow(graph, times, weights)
    borders = borders_of(flow.graph, times)
    if not borders:
        raise CaptureError(_nothing_found(flow.late, times))
    return Cut(tuple(borders), _homes(graph, flow.activations, borders), flow.main, flow.late, flow.activations)


@dataclass(frozen=True)
class Flow:
    """The activations that lead to the end, with one start above them, and the sets that `Cut` has."""

    graph: nx.DiGraph
    main: frozenset[fx.Node]
    late: frozenset[fx.Node]
    activations: frozenset[fx.Node]


def find_flow(graph: fx.Graph, times: dict[fx.Node, NodeTime], weights: Iterable[fx.Node]) -> Flow:
    """The first half of `find_cut`: what flows from stem to head."""
    weighted = _dependents(graph, set(weights))
    varying = _dependents(graph, {n for n in graph.nodes if n.op == "placeholder" and _timed(n, times)})
    main = _main_part(graph, weighted & varying)
    late = _late_nodes(graph, times, main)
    activations = {n for n in main - late if _timed(n, times)}
    return Flow(_activation_flow(graph, activations), frozenset(main), frozenset(late), frozenset(activations))


def borders_of(flow: nx.DiGraph, times: dict[fx.Node, NodeTime]) -> list[fx.Node]:
    """The second half: where layers start and end, none where there are no layers."""
    return _borders(flow, _dominator_chain(flow, times))


def _timed(node: fx.Node, times: dict[fx.Node, NodeTime]) -> bool:
    return not is_size(node) and any(layout is not None for layout in times[node].layouts)


def _dependents(graph: fx.Graph, roots: set[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and not is_size(node) and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _main_part(graph: fx.Graph, candidates: set[fx.Node]) -> set[fx.Node]:
    """What is computed from one first value, that from which most is: the embedded tokens, not a mask or a step size beside
    them.
    """
    roots = [n for n in graph.nodes if n in candidates and not any(a in candidates for a in n.all_input_nodes)]
    parts = [_dependents(graph, {root}) & candidates for root in roots]
    return max(parts, key=len, default=set())


def _late_nodes(graph: fx.Graph, times: dict[fx.Node, NodeTime], main: set[fx.Node]) -> set[fx.Node]:
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node not in main or is_size(node):
            continue
        mixes = times[node].locality is Locality.GLOBAL and node.target is not operator.getitem
        if (
            mixes
            and not any(a in late for a in node.all_input_nodes)
            and getattr(node.target, "overloadpacket", None) not in LATE_OPS
        ):
            raise CaptureError(f"{where(node)}: {node.target} is not causal in time: {times[node].why}")
        follows = any(a in late for a in node.all_input_nodes)
        if follows and (node.target in CARRIED_OPS or node.target is ATTENTION):
            origin = _origin(node, late, times)
            raise CaptureError(
                f"{where(origin)}: {origin.target}: {times[origin].why}, and {node.target} ({where(node)}) after it "
                "runs chunk by chunk"
            )
        if mixes or follows or is_final_state(node) or is_loss_share(node):
            late.add(node)
    return late


def _origin(node: fx.Node, late: set[fx.Node], times: dict[fx.Node, NodeTime]) -> fx.Node:
    """The op that mixes time among what leads to `node`."""
    found = node
    while times[found].locality is not Locality.GLOBAL or not times[found].why:
        before = next((a for a in found.all_input_nodes if a in late), None)
        if before is None:
            break
        found = before
    return found


def _activation_flow(graph: fx.Graph, activations: set[fx.Node]) -> nx.DiGraph:
    """The DAG of activations that lead to the last one, with one start above all of its roots."""
    flow = nx.DiGraph()
    ordered = [n for n in graph.nodes if n in activations]
    if not ordered:
        raise CaptureError("no value of the model depends on both the sequence and a parameter: there is nothing to train")
    for node in ordered:
        sources = [a for a in node.all_input_nodes if a in activations]
        flow.add_edges_from((a, node) for a in sources)
        if not sources:
            flow.add_edge(_START, node)
    end = _end(ordered)
    return flow.subgraph(nx.ancestors(flow, end) | {end}).copy()


def _end(ordered: list[fx.Node]) -> fx.Node:
    """The activation that everything leads to: the loss where there is one, else the last one that something outside of
    tiles reads.
    """
    losses = [n for n in ordered if n.target is LINEAR_CROSS_ENTROPY]
    return losses[-1] if losses else ordered[-1]


def _dominator_chain(flow: nx.DiGraph, times: dict[fx.Node, NodeTime]) -> list[fx.Node]:
    """The activations that every path from the start to the end passes, in order, as far as they are (B, T, …) values."""
    end = next(n for n in reversed(list(nx.topological_sort(flow))) if flow.out_degree(n) == 0)
    dominator = nx.immediate_dominators(flow, _START)
    chain = [end]
    while dominator.get(chain[-1]) not in (None, _START, chain[-1]):
        chain.append(dominator[chain[-1]])
    chain.reverse()
    usable = [n for n in chain if isinstance(value_of(n), torch.Tensor) and times[n].layout == TimeLayout(1)]
    return usable if chain[-1] in usable else [*usable, chain[-1]]


def _borders(flow: nx.DiGraph, cuts: list[fx.Node]) -> list[fx.Node]:
    order = {node: i for i, node in enumerate(nx.topological_sort(flow))}
    borders: list[fx.Node] = []
    for start, end in itertools.pairwise(cuts):
        inside = [n for n in flow.nodes if n is not _START and order[start] < order[n] <= order[end]]
        if not _is_layer(flow, start, inside, end):
            continue
        if not borders:
            borders.append(start)
        borders.append(end)
    return borders


def _is_layer(flow: nx.DiGraph, start: fx.Node, inside: list[fx.Node], end: fx.Node) -> bool:
    if end.target is LINEAR_CROSS_ENTROPY or not isinstance(value_of(end), torch.Tensor):
        return False
    carried = any(n.target in CARRIED_OPS or n.target is ATTENTION for n in inside)
    multiplies = any(n.target in _CONTRACTIONS for n in inside)
    return carried or (multiplies and flow.out_degree(start) > 1)


def _homes(graph: fx.Graph, activations: frozenset[fx.Node], borders: list[fx.Node]) -> dict[fx.Node, int]:
    """Tile of each activation: border k belongs to tile k, what follows it to tile k + 1; nodes that mix several get none."""
    number = {border: k for k, border in enumerate(borders)}
    home: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node not in activations:
            continue
        if node in number:
            home[node] = number[node]
            continue
        tiles = {number[a] + 1 if a in number else home.get(a) for a in node.all_input_nodes if a in activations}
        if not tiles:
            home[node] = 0
        elif len(tiles) == 1 and None not in tiles:
            home[node] = tiles.pop()  # type: ignore[assignment]
    return home


def _nothing_found(late: frozenset[fx.Node], times: dict[fx.Node, NodeTime]) -> str:
    reasons = [f"{where(n)}: {n.target}: {times[n].why}" for n in late if times[n].locality is Locality.GLOBAL and times[n].why]
    because = f"; time is mixed at {reasons[0]}" if reasons else ""
    return (
        "no residual stack found: the model has no recurrence (adjcomp.ops or a supported library kernel) and no residual block "
        f"between its input and its output{because}"
    )
