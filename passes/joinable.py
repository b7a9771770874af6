"""Whether ranges of time of a layer join by summaries of its states, and which kind each state is; by dataflow over its graph.

A halo must be made of the range's last steps alone, and a linear state's decays and additions of nothing that another linear
state has made: then all halos are known first, all summaries next, and each state after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from adjcomp.ir.joining import CarryKind, CarryRule
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.cut import where
from adjcomp.passes.joint import JointGraph
from adjcomp.passes.summaries import CONV, LINEAR_OPS, LINEAR_VJPS, fake_summary, named_arguments, summary_arguments


@dataclass(frozen=True)
class Joinable:
    """A template whose ranges join. rules: by carry. steps: how far the halos look back; 0 without halos."""

    template: Template
    joint: JointGraph | None
    rules: tuple[CarryRule, ...]
    steps: int


@dataclass(frozen=True)
class NotJoinable:
    """Why the ranges of a template don't join, in words."""

    reason: str


def joinable(template: Template, joint: JointGraph | None) -> Joinable | NotJoinable:
    """Classify the carries of a template; `joint` is its VJP where it has one."""
    if template.window is not None:
        return NotJoinable(f"the adjoint is cut to a window of {template.window} steps")
    if any(entry.kind is InputKind.PAST for entry in template.inputs):
        return NotJoinable("it attends to the keys and values of all chunks before")
    carried = carried_nodes(template, template.graph.graph)
    look = _Look(carried)
    reasons = [r for node in carried if (r := look.reason(node)) is not None]
    if not reasons and joint is not None:
        reasons = [r for r in (_adjoint_reason(joint, i, node) for i, node in enumerate(carried)) if r is not None]
    if reasons:
        return NotJoinable(reasons[0])
    halos = [look.back[node] for node in carried if node.target is CONV]
    return Joinable(template, joint, tuple(_rule(node) for node in carried), max(1, *halos) if halos else 0)


def carried_nodes(template: Template, graph: fx.Graph) -> list[fx.Node]:
    """The carried op behind each carry of a template, in a graph with the template's outputs."""
    results = list(next(n for n in graph.nodes if n.op == "output").args[0])
    return [n.args[0] for n, entry in zip(results, template.outputs, strict=True) if entry.kind is OutputKind.CARRY]


def _rule(node: fx.Node) -> CarryRule:
    if node.target is CONV:
        return CarryRule(CarryKind.HALO, (), node.meta["val"][1].dtype)
    move, _ = fake_summary(node)
    return CarryRule(LINEAR_OPS[node.target].kind, tuple(int(size) for size in move.shape), move.dtype)


class _Look:
    """What every node of a tile looks at. linear: the recurrence whose state it depends on; back: steps before its own."""

    def __init__(self, carried: list[fx.Node]) -> None:
        self.linear: dict[fx.Node, fx.Node | None] = {}
        self.back: dict[fx.Node, int] = {}
        for node in carried[0].graph.nodes if carried else ():
            if node.op != "output":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        own = node if node.target in LINEAR_OPS else None
        self.linear[node] = own or next((found for a in inputs if (found := self.linear[a]) is not None), None)
        self.back[node] = max((self.back[a] for a in inputs), default=0)
        if node.target is CONV:
            self.back[node] += int(named_arguments(node)["weight"].meta["val"].shape[1]) - 1

    def reason(self, node: fx.Node) -> str | None:
        """What keeps a carried op from being joined, if anything does."""
        if node.target is CONV:
            return self._on_linear(node, node.all_input_nodes, "looks back on what")
        if node.target not in LINEAR_OPS:
            return f"{where(node)}: no summary says what a range of time does to the state of {_name(node)}"
        given = [a for a in summary_arguments(node) if isinstance(a, fx.Node)]
        _, end = fake_summary(node)
        if end.dtype is not node.meta["val"][CARRIED_OPS[node.target].state_output].dtype:
            return f"{where(node)}: the state of {_name(node)} is wider than what moves it"
        return self._on_linear(node, given, "depends in its decay or inputs on what")

    def _on_linear(self, node: fx.Node, inputs: list[fx.Node], verb: str) -> str | None:
        found = next((found for a in inputs if (found := self.linear[a]) is not None), None)
        return None if found is None else f"{where(node)}: {_name(node)} {verb} {_name(found)} makes in the same layer"


def _adjoint_reason(joint: JointGraph, carry: int, node: fx.Node) -> str | None:
    """A cotangent that isn't handed on by the VJP of the recurrence alone."""
    found = gradient_of_carry(joint, joint.graph, carry)
    if node.target is CONV or found is None or found.args[0].target in LINEAR_VJPS:  # type: ignore[union-attr]
        return None
    return f"{where(node)}: the cotangent of the state of {_name(node)} is made by more than its VJP"


def gradient_of_carry(joint: JointGraph, graph: fx.Graph, carry: int) -> fx.Node | None:
    """The gradient of a carry among the last results of a graph; None where it has none."""
    results: list[Any] = list(next(n for n in graph.nodes if n.op == "output").args[0])
    entries = [joint.template.inputs[i] for i in joint.gradients]
    pairs = zip(entries, results[len(results) - len(entries) :], strict=True)
    return next((n for entry, n in pairs if entry.kind is InputKind.CARRY and entry.index == carry), None)


def _name(node: fx.Node) -> str:
    return str(node.target._schema.name).removeprefix("adjcomp::")  # type: ignore[union-attr]
