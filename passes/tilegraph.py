"""Copy a part of a traced graph into a tile function: a graph that runs on one chunk of time."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.ir.stack import InputKind, OutputKind
from adjcomp.passes.carried import ATTENTION, CARRIED_OPS
from adjcomp.passes.cut import Cut, is_size, where
from adjcomp.passes.randomness import REWRITES, Draw, check_random, is_random, pair
from adjcomp.passes.timeaxis import Locality, NodeTime, time_factor

aten = torch.ops.aten


class TileGraph:
    """A tile function under construction.

    `fetch(node)` brings a node of the traced graph, and all it needs, into the tile; what lies outside becomes a placeholder,
    recorded in
    `inputs` as (kind, traced node). Sizes that equal T are read from the tile's own inputs, so that the graph runs at any chunk
    length.
    """

    def __init__(self, index: int, cut: Cut, times: dict[fx.Node, NodeTime], state_inputs: dict[str, fx.Node], time: Any) -> None:
        self.index = index
        self.cut = cut
        self.times = times
        self.state_inputs = state_inputs  # parameter and buffer placeholders by name
        self.time = time
        self.graph = fx.Graph()
        self.inputs: dict[InputKind, list[fx.Node]] = {kind: [] for kind in InputKind}  # the traced node behind each placeholder
        self.placeholders: dict[InputKind, list[fx.Node]] = {kind: [] for kind in InputKind}
        self.results: list[tuple[OutputKind, fx.Node]] = []
        self.carried: list[fx.Node] = []  # traced carried ops, in the order of their states
        self.stored: list[fx.Node] = []  # traced keys and values that are kept over the whole sequence
        self.memo: dict[fx.Node, fx.Node] = {}
        self.clock: fx.Node | None = None  # the tile's own length
        self.drawn: list[fx.Node] = []  # traced random ops, in the order of their numbers
        self.border = cut.borders[index - 1] if index > 0 else None

    def fetch(self, node: fx.Node) -> fx.Node:
        """The tile's copy of `node`."""
        for needed in self._order(node):
            self.memo[needed] = self._make(needed)
        return self.memo[node]

    def _order(self, node: fx.Node) -> list[fx.Node]:
        """What has to be made for `node`, inputs first (iterative: graphs are deeper than Python's stack)."""
        order: list[fx.Node] = []
        seen: set[fx.Node] = set()
        stack: list[tuple[fx.Node, bool]] = [(node, False)]
        while stack:
            current, expanded = stack.pop()
            if expanded:
                order.append(current)
            elif current not in self.memo and current not in seen:
                seen.add(current)
                stack.append((current, True))
                stack.extend((a, False) for a in reversed(self._needs(current)))
        return order

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        if self._input_kind(node) is not None or self._reads_length(node):
            return []
        if node.target in CARRIED_OPS:
            return [a for a in node.all_input_nodes if a is not state_argument(node)]
        return list(node.all_input_nodes)

    def _reads_length(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is aten.sym_size.int

    def _input_kind(self, node: fx.Node) -> InputKind | None:
        """The kind of placeholder that stands for `node` in this tile; None when the node is copied."""
        if node is self.border:
            return InputKind.STREAM
        if node.op == "placeholder":
            return InputKind.PARAMETER if node.name in self.state_inputs else InputKind.SIDE
        if node.op == "get_attr":
            return InputKind.SIDE
        if not is_size(node) and node not in self.cut.main and self.times[node].locality is Locality.GLOBAL:
            return InputKind.SIDE
        return None

    def _make(self, node: fx.Node) -> fx.Node:
        kind = self._input_kind(node)
        if kind is not None:
            return self._placeholder(kind, node)
        if self._reads_length(node):
            return self._length(node)
        self._check_inside(node)
        if node.target in CARRIED_OPS:
            return self._carried(node)
        if node.target is ATTENTION:
            return self._attention(node)
        if is_random(node):
            return self._random(node)
        if node.target is operator.getitem and self.memo[node.args[0]].target is pair:  # type: ignore[index]
            return self.memo[node.args[0]].args[node.args[1]]  # type: ignore[index, return-value]
        return self._copy(node)

    def _check_inside(self, node: fx.Node) -> None:
        if node in self.cut.late:
            raise CaptureError(f"{where(node)}: {node.target} needs the whole sequence, and a layer after it runs chunk by chunk")
        if node in self.cut.activations and self.cut.home.get(node) != self.index:
            raise CaptureError(f"{where(node)}: {node.target} reaches into tile {self.index} around the residual stream")

    def _placeholder(self, kind: InputKind, node: fx.Node) -> fx.Node:
        self.inputs[kind].append(node)
        return self._new_placeholder(kind, node.meta["val"])

    def _new_placeholder(self, kind: InputKind, value: Any) -> fx.Node:
        last = next(iter(reversed([n for n in self.graph.nodes if n.op == "placeholder"])), None)
        with (
            self.graph.inserting_after(last)
            if last is not None
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        ):
            made = self.graph.placeholder(f"{kind.value}_{len(self.placeholders[kind])}")
        made.meta["val"] = value
        self.placeholders[kind].append(made)
        return made

    def _random(self, node: fx.Node) -> fx.Node:
        """A random op becomes a function of the step's seed and its place in the sequence."""
        check_random(node, where(node))
        layout = self.times[node].layouts[0]
        if layout is None or layout.inner != 1:
            raise CaptureError(
                f"{where(node)}: {node.target} draws numbers without a time axis; noise on weights cannot be repeated by chunks"
            )
        value = node.meta["val"][0] if isinstance(node.meta["val"], tuple | list) else node.meta["val"]
        seed, offset = self._counter(InputKind.SEED), self._counter(InputKind.OFFSET)
        shape = [size if isinstance(size, int) else self._length_of(node, size) for size in value.shape]
        draw = Draw(self.graph, seed, offset, len(self.drawn), layout, value, dict(node.meta))
        self.drawn.append(node)
        return REWRITES[node.target](draw, node, lambda a: self.memo.get(a, a), shape)

    def _counter(self, kind: InputKind) -> fx.Node:
        if not self.placeholders[kind]:
            with self.cut.borders[0].meta["val"].fake_mode:
                self._new_placeholder(kind, torch.empty((), dtype=torch.int64))
        return self.placeholders[kind][0]

    def _copy(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, lambda a: self.memo[a])
        made.meta = dict(node.meta)
        return made

    def _carried(self, node: fx.Node) -> fx.Node:
        """A recurrence: its incoming state becomes a placeholder, its outgoing one an output."""
        spec = CARRIED_OPS[node.target]
        names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
        position = names.index(spec.state_argument)
        state = node.meta["val"][spec.state_output]
        carry = self._new_placeholder(InputKind.CARRY, state)
        args = [carry if i == position else a for i, a in enumerate(node.args)]
        made = self.graph.create_node("call_function", node.target, fx.map_arg(tuple(args), lambda a: self.memo.get(a, a)), {})
        made.meta = dict(node.meta)
        self.carried.append(node)
        outgoing = self.graph.call_function(operator.getitem, (made, spec.state_output))
        outgoing.meta = {**node.meta, "val": state}
        self.results.append((OutputKind.CARRY, outgoing))
        return made

    def _attention(self, node: fx.Node) -> fx.Node:
        """Attention: keys and values of earlier chunks become placeholders, those of the chunk outputs."""
        q, k, v, *_ = node.args
        pasts = []
        for source in (k, v):
            pasts.append(self._new_placeholder(InputKind.PAST, source.meta["val"]))  # type: ignore[union-attr]
            self.stored.append(source)  # type: ignore[arg-type]
            self.results.append((OutputKind.STORED, self.memo[source]))  # type: ignore[index]
        args = (*(self.memo[a] for a in (q, k, v)), *pasts, *node.args[5:])  # type: ignore[index]
        made = self.graph.create_node("call_function", node.target, args, {})
        made.meta = dict(node.meta)
        return made

    def _length(self, node: fx.Node) -> fx.Node:
        """T read inside a layer is the chunk's own length, times whatever constant the traced size had."""
        return self._length_of(node, node.meta["val"])

    def _length_of(self, node: fx.Node, size: Any) -> fx.Node:
        factor = time_factor(size, self.time)
        if factor is None:
            raise CaptureError(f"{where(node)}: a size of {size} where T is the sequence length cannot be cut into chunks")
        clock = self._clock()
        if factor == 1:
            return clock
        scaled = self.graph.call_function(operator.mul, (clock, factor))
        scaled.meta = {"val": size}
        return scaled

    def _clock(self) -> fx.Node:
        if self.clock is None:
            source, dim = self._timed_placeholder()
            self.clock = self.graph.call_function(aten.sym_size.int, (source, dim))
            self.clock.meta = {"val": source.meta["val"].shape[dim]}
        return self.clock

    def _timed_placeholder(self) -> tuple[fx.Node, int]:
        if self.border is not None:
            if self.border not in self.memo:
                self.memo[self.border] = self._placeholder(InputKind.STREAM, self.border)
            return self.memo[self.border], 1
        for made in (n for n in self.graph.nodes if n.op == "placeholder"):
            for dim, size in enumerate(made.meta["val"].shape):
                if time_factor(size, self.time) == 1:
                    return made, dim
        raise CaptureError(f"tile {self.index} reads the sequence length but takes no sequence")

    def output(self, kind: OutputKind, node: fx.Node) -> None:
        """Declare a traced node an output of the tile."""
        self.results.append((kind, self.fetch(node)))


def state_argument(node: fx.Node) -> fx.Node | None:
    """The traced node that a carried op takes its initial state from; None for zeros."""
    spec = CARRIED_OPS[node.target]
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    given = node.args[names.index(spec.state_argument)]
    return given if isinstance(given, fx.Node) else None
