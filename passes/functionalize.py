"""Rewrite in-place operations of a traced graph to operations that make new values.

A write to a value is a write to its storage: the base it is a view of, and every other view of that base, are made again where
they
are read next. Buffers and inputs that the model changes keep their last value as extra outputs of the graph, behind the model's
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.aliasing import is_alias, reads_part
from adjcomp.passes.emitting import Emitter
from adjcomp.passes.scatter import write_through
from adjcomp.passes.writes import mutates, written_value

aten = torch.ops.aten


@dataclass(frozen=True)
class Functional:
    """A graph without in-place operations.

    graph: outputs are the model's, then one for each name in `updated`. updated: buffers and inputs (by name) that the model
    changes.
    """

    graph: fx.Graph
    updated: tuple[str, ...]


def functionalize(
    graph: fx.Graph,
    names: tuple[str, ...],
    parameters: frozenset[str],
    wanted: frozenset[str],
    reassigned: tuple[str, ...] = (),
) -> Functional:
    """A copy of `graph` in which no operation changes a value.

    names: of the placeholders, in order. parameters: those that must not change. wanted: those whose gradient is wanted.
    reassigned: buffers whose new values are the last outputs of `graph`.
    Raises CaptureError naming the module and the operation for a write that has no such form, or that autograd would not see.
    """
    writer = _Writer(graph, names, parameters, wanted)
    for node in graph.nodes:
        writer.visit(node)
    return writer.finish(reassigned)


class _Writer:
    def __init__(self, graph: fx.Graph, names: tuple[str, ...], parameters: frozenset[str], wanted: frozenset[str]) -> None:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.names: Mapping[fx.Node, str] = dict(zip(placeholders, names, strict=True))
        self.parameters = parameters
        self.emitter = Emitter(fx.Graph(), {n for n, name in self.names.items() if name in wanted})
        self.parent: dict[fx.Node, fx.Node] = {}  # of a view, what it looks at
        self.current: dict[fx.Node, fx.Node] = {}
        self.stamp: dict[fx.Node, int] = {}
        self.version: dict[fx.Node, int] = {}  # writes so far, by base
        self.updated: dict[fx.Node, None] = {}
        self.outputs: list[fx.Node] = []
        self.output_node: fx.Node | None = None

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self.output_node = node
            self.outputs = list(node.args[0])  # type: ignore[arg-type]
        elif mutates(node):
            self._write(node)
        else:
            if node.op == "call_function" and (is_alias(node) or (reads_part(node) and node.args[0] in self.parent)):
                self.parent[node] = node.args[0]  # type: ignore[assignment]
            self._set(node, self.emitter.copy(node, self.read))

    def finish(self, reassigned: tuple[str, ...]) -> Functional:
        assert self.output_node is not None
        changed = [n for n in self.updated if self.names[n] not in reassigned]
        results = [self.read(n) for n in (*self.outputs, *changed)]
        made = self.emitter.graph.output(results)
        made.meta = dict(self.output_node.meta)
        return Functional(self.emitter.graph, (*reassigned, *(self.names[n] for n in changed)))

    def base(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """The present value of a traced node; a view of a changed base is taken again."""
        if self.stamp[node] != self.version.get(self.base(node), 0):
            parent = self.read(self.parent[node])
            self._set(
                node,
                parent
                if mutates(node)
                else self.emitter.copy(node, lambda a: parent if a is self.parent[node] else self.read(a)),
            )
        return self.current[node]

    def _set(self, node: fx.Node, value: fx.Node) -> None:
        self.current[node] = value
        self.stamp[node] = self.version.get(self.base(node), 0)

    def _write(self, node: fx.Node) -> None:
        target: fx.Node = node.args[0]  # type: ignore[assignment]
        value = written_value(self.emitter, node, self.read)
        self.parent[node] = target
        base, path = self.base(target), [target]
        while path[-1] in self.parent:
            path.append(self.parent[path[-1]])
        self._check(node, base, path, value)
        values = [value]
        for view in path[:-1]:
            whole = self.read(self.parent[view])
            values.append(values[-1] if mutates(view) else write_through(self.emitter, view, whole, values[-1], node))
        self.version[base] = self.version.get(base, 0) + 1
        for seen, new in zip(path, values, strict=True):
            self._set(seen, new)
        self._set(node, value)
        if base in self.names:
            self.updated[base] = None

    def _check(self, node: fx.Node, base: fx.Node, path: list[fx.Node], value: fx.Node) -> None:
        place = f"{node.meta.get('where', 'the root module')}: {node.target}"
        if base in self.names and self.names[base] in self.parameters:
            raise CaptureError(f"{place} changes the parameter {self.names[base]!r} in place during forward")
        if base in self.emitter.differentiable and base in self.names:
            raise CaptureError(f"{place} changes the input {self.names[base]!r}, which requires grad, in place")
        hidden = node.meta.get("no_grad") or any(n.target is aten.detach.default for n in path)
        if hidden and (self.read(base) in self.emitter.differentiable or value in self.emitter.differentiable):
            raise CaptureError(
                f"{place} changes a value in place behind autograd's back (under no_grad, or through .data or detach())"
            )
        if base.op == "get_attr":
            raise CaptureError(f"{place} changes a constant in place")
