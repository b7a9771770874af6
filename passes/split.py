"""A joint graph cut in two: a forward that keeps, and a backward that reads what was kept.

The cut decides what a tile keeps. LEAN keeps what is dear to make (matrix products, states of recurrences) and makes the
pointwise rest again in the backward; it is a minimum cut over bytes. FULL keeps everything the backward reads, as plain autograd
does.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from adjcomp.ir.stack import InputKind, OutputKind
from adjcomp.passes.aliasing import is_alias, storage_root
from adjcomp.passes.joint import JointGraph
from adjcomp.passes.sizes import number_of_bytes

aten = torch.ops.aten
NOMINAL_CHUNK = 1024  # the cut is chosen at this length; every length is close to proportional


class KeepPolicy(enum.Enum):
    """What a tile keeps for its VJP."""

    LEAN = "lean"
    FULL = "full"


@dataclass(frozen=True)
class Split:
    """A joint graph cut in two.

    forward: inputs -> (outputs…, saved…). backward: (inputs it reads…, saved…, cotangents…) -> gradients.
    reads: indices of template inputs the backward reads; reads_output: indices of template outputs it reads (kept as values, not
        saved).
    """

    joint: JointGraph
    policy: KeepPolicy
    forward: fx.Graph
    backward: fx.Graph
    saved: int
    reads: tuple[int, ...]
    reads_outputs: tuple[int, ...]


def split(joint: JointGraph, policy: KeepPolicy) -> Split:
    """Cut a joint graph into a forward that keeps and a backward that consumes."""
    parts = _Parts(joint)
    saved = parts.lean() if policy is KeepPolicy.LEAN else parts.full()
    return parts.cut(saved, policy)


_RECOMPUTABLE = {
    torch.ops.adjcomp.causal_conv1d.default,
    torch.ops.adjcomp.counter_uniform.default,
    torch.ops.adjcomp.rms_norm.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.native_layer_norm.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.embedding.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    operator.getitem,
}


def _recomputable(node: fx.Node) -> bool:
    return (
        node.target in _RECOMPUTABLE
        or is_alias(node)
        or torch.Tag.pointwise in getattr(node.target, "tags", ())
        or not _is_tensor(node)
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


class _Parts:
    """The forward and backward halves of a joint graph."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        nodes = list(joint.graph.nodes)
        count = len(joint.template.inputs)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.inputs, self.tangents = placeholders[:count], placeholders[count:]
        results = list(nodes[-1].args[0])
        self.outputs = results[: len(joint.template.outputs)]
        self.grads = results[len(self.outputs) :]
        self.backward = set(self.tangents)
        for node in nodes:
            if node.op == "call_function" and any(a in self.backward for a in node.all_input_nodes):
                self.backward.add(node)
        self.forward = [n for n in nodes if n.op == "call_function" and n not in self.backward]
        self.free = {
            n
            for n, entry in zip(self.inputs, joint.template.inputs, strict=True)
            if entry.kind not in (InputKind.STREAM, InputKind.CARRY)
        }

    def _crossing(self) -> list[fx.Node]:
        """Forward values that the backward reads, in order."""
        readers = [n for n in self.joint.graph.nodes if n in self.backward]
        known = set(self.forward) | set(self.inputs)
        seen = dict.fromkeys(a for n in readers for a in n.all_input_nodes if a in known)
        seen.update(dict.fromkeys(g for g in self.grads if g in known))
        return list(seen)

    def full(self) -> list[fx.Node]:
        """Everything the backward reads; of a view, the value that owns the storage (the view is made again)."""
        roots = [storage_root(n) for n in self._crossing() if _is_tensor(n)]
        return list(dict.fromkeys(r for r in roots if r.op == "call_function" and not self._parameter_only(r)))

    def _parameter_only(self, node: fx.Node) -> bool:
        stack, seen = [node], set()
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n.op == "placeholder" and n not in self.free:
                return False
            if n.op == "call_function" and not _recomputable(n):
                return False
            stack.extend(n.all_input_nodes)
        return all(
            self.joint.template.inputs[self.inputs.index(n)].kind is InputKind.PARAMETER for n in seen if n.op == "placeholder"
        )

    def lean(self) -> list[fx.Node]:
        """A minimum cut: cheapest set of values, in bytes, from which recomputable ops lead to all the backward reads."""
        flow = nx.DiGraph()
        flow.add_node("source")
        flow.add_node("sink")
        for node in [*self.inputs, *self.forward]:
            if not _is_tensor(node):
                continue
            savable = isinstance(node.meta["val"], torch.Tensor) and not is_alias(node)
            if node in self.free:
                flow.add_edge((node, "in"), (node, "out"), capacity=0)
            elif savable:
                flow.add_edge((node, "in"), (node, "out"), capacity=self._price(node))
            else:
                flow.add_edge((node, "in"), (node, "out"))
            if node.op == "placeholder" or not _recomputable(node):
                flow.add_edge("source", (node, "in"))
            for user in node.users:
                if user in self.backward or (user.op == "output" and node in self.grads):
                    flow.add_edge((node, "out"), "sink")
                elif user.op == "call_function" and _is_tensor(user):
                    flow.add_edge((node, "out"), (user, "in"))
        _, (reachable, _) = nx.minimum_cut(flow, "source", "sink")
        chosen = [
            n
            for n in [*self.inputs, *self.forward]
            if (n, "in") in reachable and (n, "out") in flow and (n, "out") not in reachable
        ]
        return [n for n in chosen if n.op == "call_function"]

    def _price(self, node: fx.Node) -> int:
        """Bytes, with a small surcharge so that of equal cuts the one nearer to the backward (less to make again) wins."""
        position = self.forward.index(node) if node.op == "call_function" else 0
        size = number_of_bytes(node.meta["val"], self.joint.template.time, NOMINAL_CHUNK)
        return size * 4096 + (len(self.forward) - position)

    def cut(self, saved: list[fx.Node], policy: KeepPolicy) -> Split:
        """Build the two graphs."""
        outputs_by_node = {n: i for i, n in reversed(list(enumerate(self.outputs)))}
        streams = {i for i, o in enumerate(self.joint.template.outputs) if o.kind is OutputKind.STREAM}
        reads_outputs = tuple(sorted({outputs_by_node[n] for n in saved if outputs_by_node.get(n) in streams}))
        kept = [n for n in saved if outputs_by_node.get(n) not in reads_outputs]
        from_outputs = [self.outputs[i] for i in reads_outputs]
        backward, reads = self._backward_graph(kept, from_outputs)
        return Split(self.joint, policy, self._forward_graph(kept), backward, len(kept), reads, reads_outputs)

    def _forward_graph(self, kept: list[fx.Node]) -> fx.Graph:
        graph, memo = fx.Graph(), {}
        for node in self.inputs:
            memo[node] = graph.node_copy(node)
        _demand(graph, memo, [*self.outputs, *kept])
        graph.output(tuple(memo[n] for n in [*self.outputs, *kept]))
        return graph

    def _backward_graph(self, kept: list[fx.Node], from_outputs: list[fx.Node]) -> tuple[fx.Graph, tuple[int, ...]]:
        graph, memo = fx.Graph(), {}
        for node in [*self.inputs, *from_outputs, *kept, *self.tangents]:
            memo[node] = graph.placeholder(node.name)
            memo[node].meta = dict(node.meta)
        for node in self.joint.graph.nodes:
            if node in self.backward and node.op == "call_function":
                _demand(graph, memo, [node])
        _demand(graph, memo, self.grads)
        graph.output(tuple(memo[n] for n in self.grads))
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        reads = []
        for i, node in enumerate(self.inputs):
            if memo[node].users:
                reads.append(i)
            else:
                graph.erase_node(memo[node])
        return graph, tuple(reads)


def _demand(graph: fx.Graph, memo: dict[fx.Node, fx.Node], wanted: list[fx.Node]) -> None:
    """Copy what `wanted` needs right before its first use, so that recomputed values live briefly."""
    stack = [(n, False) for n in reversed(wanted)]
    while stack:
        node, ready = stack.pop()
        if node in memo:
            continue
        if ready:
            memo[node] = graph.node_copy(node, lambda a: memo[a])
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.all_input_nodes))
