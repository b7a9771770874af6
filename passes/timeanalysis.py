"""Op by op: whether out[t] needs anything but in[t], and where time is in every value of a graph.

Nothing is assumed of an op that has no rule: it is GLOBAL.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from adjcomp.passes.timeaxis import (
    FREE,
    Layouts,
    Locality,
    NodeTime,
    NotLocalError,
    TimeContext,
    TimeLayout,
    tensors_in,
    time_factor,
    value_of,
)
from adjcomp.passes.timerules import RULES, carried_rule, pointwise_rule


def analyse_time(graph: fx.Graph, time: Any, inputs: dict[fx.Node, TimeLayout | None]) -> dict[fx.Node, NodeTime]:
    """Classify every node of `graph`; `inputs` gives the layout of each placeholder (None: no time in it)."""
    return _Analysis(time, inputs).run(graph)


class _Analysis:
    def __init__(self, time: Any, inputs: dict[fx.Node, TimeLayout | None]) -> None:
        self.time = time
        self.inputs = inputs
        self.result: dict[fx.Node, NodeTime] = {}
        self.context = TimeContext(time, self.result)

    def run(self, graph: fx.Graph) -> dict[fx.Node, NodeTime]:
        for node in graph.nodes:
            if node.op == "placeholder":
                layout = self.inputs[node]
                self.result[node] = FREE if layout is None else NodeTime(Locality.LOCAL, (layout,))
            elif node.op == "call_function":
                self.result[node] = self.visit(node)
            elif node.op == "get_attr":
                self.result[node] = FREE
        return self.result

    def visit(self, node: fx.Node) -> NodeTime:
        if isinstance(value_of(node), torch.SymInt | int | float | bool | torch.SymFloat | torch.SymBool):
            return FREE
        if node.target is operator.getitem:
            return self._getitem(node)
        touched = [a for a in node.all_input_nodes if self.result[a].locality is not Locality.FREE]
        shaped = [self._by_shape(v) for v in tensors_in(value_of(node))]
        if not touched and all(layout is None for layout in shaped):
            return FREE
        try:
            locality, layouts = self._apply_rule(node)
            if locality is not Locality.CARRIED:  # a recurrence may keep states of another length for its VJP
                self._check_shapes(node, layouts)
        except NotLocalError as reason:
            return NodeTime(Locality.GLOBAL, tuple(shaped), str(reason))
        if all(layout is None for layout in layouts) and locality is Locality.LOCAL:
            return FREE
        return NodeTime(locality, layouts)

    def _getitem(self, node: fx.Node) -> NodeTime:
        source = self.result[node.args[0]]  # type: ignore[index]
        if source.locality is Locality.FREE:
            return FREE
        layout = source.layouts[node.args[1]]  # type: ignore[index]
        if source.locality is Locality.GLOBAL:
            return NodeTime(Locality.GLOBAL, (layout,), source.why)
        return NodeTime(Locality.LOCAL, (layout,))

    def _by_shape(self, value: torch.Tensor) -> TimeLayout | None:
        found = [(dim, time_factor(size, self.time)) for dim, size in enumerate(value.shape)]
        found = [(dim, factor) for dim, factor in found if factor != 0]
        return TimeLayout(found[0][0], found[0][1] or 1) if found else None

    def _apply_rule(self, node: fx.Node) -> tuple[Locality, Layouts]:
        target = node.target
        rule = RULES.get(getattr(target, "overloadpacket", None))
        if rule is None and getattr(target, "namespace", "") == "adjcomp":
            return carried_rule(self.context, node)
        if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
            rule = pointwise_rule
        if rule is None:
            raise NotLocalError(f"no rule says how {target} treats time")
        layouts = rule(self.context, node)
        return Locality.LOCAL, layouts if isinstance(layouts, tuple) else (layouts,)

    def _check_shapes(self, node: fx.Node, layouts: Sequence[TimeLayout | None]) -> None:
        """A rule must agree with the traced shapes; a disagreement is a mixing of time the rule did not see."""
        values = tensors_in(value_of(node))
        if len(values) != len(layouts):
            raise NotLocalError(f"{node.target} has {len(values)} outputs and its rule {len(layouts)}")
        for value, layout in zip(values, layouts, strict=True):
            for dim, size in enumerate(value.shape):
                factor = time_factor(size, self.time)
                expected = layout.outer * layout.inner if layout is not None and layout.dim == dim else 0
                if factor != expected:
                    raise NotLocalError(
                        f"{node.target} makes a value of shape {tuple(value.shape)}, which is not time by {expected}"
                    )
