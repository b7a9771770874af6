"""The VJP of a tile function as explicit nodes: one joint graph of forward and backward, then cut in two.

The cut decides what a tile keeps. LEAN keeps what is dear to make (matrix products, states of recurrences) and makes the
pointwise rest again in the backward; it is a minimum cut over bytes. FULL keeps everything the backward reads, as plain autograd
does.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from adjcomp.ir.interpret import GradInterpreter
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.passes.adjoint_window import cut_to_window
from adjcomp.passes.aliasing import is_alias, storage_root
from adjcomp.passes.cleanup import tidy
from adjcomp.passes.norms import add_residual_cotangents
from adjcomp.passes.products import add_in_products
from adjcomp.passes.sizes import number_of_bytes

aten = torch.ops.aten
NOMINAL_CHUNK = 1024  # the cut is chosen at this length; every length is close to proportional


class KeepPolicy(enum.Enum):
    """What a tile keeps for its VJP."""

    LEAN = "lean"
    FULL = "full"


@dataclass(frozen=True)
class JointGraph:
    """Forward and VJP of one template.

    graph: placeholders are the template's inputs, then one cotangent for each output in `cotangents`; outputs are the template's
    outputs, then one gradient for each input in `gradients`.
    """

    template: Template
    graph: fx.Graph
    cotangents: tuple[int, ...]  # indices of template outputs that take a cotangent
    gradients: tuple[int, ...]  # indices of template inputs whose gradient comes out

    def cotangent_values(self) -> list[tuple[int, torch.Tensor]]:
        """Template output and fake value of each cotangent that comes in."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        values = [n.meta["val"] for n in placeholders[len(self.template.inputs) :]]
        return list(zip(self.cotangents, values, strict=True))

    @property
    def hands_cotangent_on(self) -> bool:
        """Whether the gradient of x[k-1,c] is the cotangent of x[k,c] as it came in."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"][len(self.template.inputs) :]
        results = list(next(n for n in self.graph.nodes if n.op == "output").args[0])[len(self.template.outputs) :]
        tangents = [
            n for n, i in zip(placeholders, self.cotangents, strict=True) if self.template.outputs[i].kind is OutputKind.STREAM
        ]
        streams = [n for n, i in zip(results, self.gradients, strict=True) if self.template.inputs[i].kind is InputKind.STREAM]
        return len(streams) == 1 and streams == tangents


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


def differentiate(template: Template) -> JointGraph | None:
    """Trace the VJP of a template; None where no input wants a gradient."""
    gradients = tuple(i for i, entry in enumerate(template.inputs) if entry.differentiable)
    cotangents = tuple(i for i, entry in enumerate(template.outputs) if entry.differentiable)
    if not gradients or not cotangents:
        return None
    placeholders = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["val"] for n in placeholders]
    results = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
    mode = next(v.fake_mode for v in fakes)
    found: list[bool] = []

    def joint(inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(i in gradients) for i, x in enumerate(inputs)]
        outputs = GradInterpreter(template.graph).run(*leaves)
        reached = [(outputs[i], t) for i, t in zip(cotangents, tangents, strict=True) if outputs[i].requires_grad]
        wanted = [leaves[i] for i in gradients]
        grads = (
            torch.autograd.grad([o for o, _ in reached], wanted, [t for _, t in reached], allow_unused=True)
            if reached
            else [None] * len(wanted)
        )
        found[:] = [g is not None for g in grads]
        return [*(o.detach() for o in outputs), *(g for g in grads if g is not None)]

    as_cast = (torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False))  # casts are in the graph already
    with mode, enable_python_dispatcher(), torch.enable_grad(), as_cast[0], as_cast[1]:
        tangents = [
            torch.empty(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype, device=n.meta["val"].device)
            for i, n in enumerate(results)
            if i in cotangents
        ]
        inputs = [torch.empty_strided(tuple(v.shape), v.stride(), dtype=v.dtype, device=v.device) for v in fakes]
        traced = make_fx(joint)(inputs, tangents)
    graph = tidy(traced.graph)
    if template.window is not None:
        cut_to_window(graph, template, cotangents)
    add_residual_cotangents(graph)
    add_in_products(graph, [n for n in graph.nodes if n.op == "placeholder"][len(template.inputs) :])
    reached = tuple(i for i, yes in zip(gradients, found, strict=True) if yes)
    return JointGraph(template, graph, cotangents, reached)


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
