"""A first value that later layers read again, around the residual stream: it is made anew where it is read.

A hybrid of the Zamba kind joins the embedded tokens to the input of every shared attention block. Then no value between stem and
head is passed by every path, and the whole model would be one layer. Looking tokens up again costs next to nothing, so a copy of
what leads to that value is given to the layers that read it later; in a tile it is made of token ids and weights from the side.
Where the model is given its first value, or draws it, it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
import torch
from torch import fx

from adjcomp.passes.carried import ATTENTION, CARRIED_OPS
from adjcomp.passes.cut import Flow, borders_of, find_flow
from adjcomp.passes.randomness import is_random
from adjcomp.passes.timeaxis import NodeTime

FEWEST_READERS = 3  # a layer alone reads its input twice: for its branch and for the sum


def make_again(graph: fx.Graph, times: dict[fx.Node, NodeTime], weights: Iterable[fx.Node]) -> None:
    """Rewrite `graph` in place where that gives more layers; `times` learns of the new nodes."""
    weights = tuple(weights)
    flow = find_flow(graph, times, weights)
    known = borders_of(flow.graph, times)
    source = _source(flow, known)
    if source is None:
        return
    if _drop_clones(source):
        flow = find_flow(graph, times, weights)
    order = {node: i for i, node in enumerate(graph.nodes)}
    readers = sorted(flow.graph.successors(source), key=order.__getitem__)
    best, chosen = len(known), len(readers)
    for first in range(len(readers) - 1, 1, -1):  # of equal ones, that with the fewest copies
        found = _count_without(flow.graph, source, readers[first:], times)
        if found > best:
            best, chosen = found, first
    if chosen < len(readers):
        copy = _copied(graph, source, flow.main, times)
        for reader in readers[chosen:]:
            reader.replace_input_with(source, copy)


def _drop_clones(source: fx.Node) -> bool:
    """Readers of a plain copy become readers of the value: nothing is written in place any more. Whether there were copies."""
    clones = [n for n in source.users if n.target is torch.ops.aten.clone.default and not n.kwargs]
    for clone in clones:
        clone.replace_all_uses_with(source)
        source.graph.erase_node(clone)
    return bool(clones)


def _source(flow: Flow, borders: list[fx.Node]) -> fx.Node | None:
    """The first border, if more than one layer may read it and it is cheap to make from tokens."""
    if not borders or flow.graph.out_degree(borders[0]) < FEWEST_READERS:
        return None
    makers = _makers(borders[0], flow.main)
    dear = any(n.op != "call_function" or n.target in CARRIED_OPS or n.target is ATTENTION or is_random(n) for n in makers)
    return None if dear else borders[0]


def _makers(source: fx.Node, main: frozenset[fx.Node]) -> list[fx.Node]:
    """The activations that lead to a value, itself included, in order."""
    found, left = {source}, [source]
    while left:
        for before in left.pop().all_input_nodes:
            if before in main and before not in found:
                found.add(before)
                left.append(before)
    return [n for n in source.graph.nodes if n in found]


def _count_without(flow: nx.DiGraph, source: fx.Node, readers: list[fx.Node], times: dict[fx.Node, NodeTime]) -> int:
    """Borders where `readers` don't read `source`."""
    rest = flow.copy()
    rest.remove_edges_from((source, reader) for reader in readers)
    return len(borders_of(rest, times))


def _copied(graph: fx.Graph, source: fx.Node, main: frozenset[fx.Node], times: dict[fx.Node, NodeTime]) -> fx.Node:
    """What leads to `source` once more, after it."""
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_after(source):
        for node in reversed(_makers(source, main)):
            made[node] = graph.node_copy(node)  # each goes right after the source, so before those made already
    for node, copy in made.items():
        copy.args = fx.map_arg(node.args, lambda a: made.get(a, a))
        copy.kwargs = fx.map_arg(node.kwargs, lambda a: made.get(a, a))
        copy.meta = dict(node.meta)
        times[copy] = times[node]
    return made[source]
