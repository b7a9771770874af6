"""New nodes with the values they would have, for passes that write a graph anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

aten = torch.ops.aten


class Emitter:
    """Appends nodes to `graph`. `differentiable` collects those through which a wanted gradient flows; it starts with
    placeholders of the
    graph that is copied from."""

    def __init__(self, graph: fx.Graph, wanted: set[fx.Node]) -> None:
        self.graph = graph
        self.differentiable = set(wanted)

    def copy(self, node: fx.Node, look: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The node again, over other arguments."""
        made = self.graph.node_copy(node, look)
        made.meta = dict(node.meta)
        if node in self.differentiable or self._passes_gradient(made):
            self.differentiable.add(made)
        return made

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call whose fake value is computed from its arguments, at the place of `like`."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {key: like.meta[key] for key in ("where", "no_grad") if key in like.meta}
        made.meta["val"] = fake_result(target, args, kwargs)
        if self._passes_gradient(made):
            self.differentiable.add(made)
        return made

    def sizes(self, like: fx.Node, source: fx.Node) -> list[Any]:
        """The sizes of `source`: numbers, or nodes that read a symbolic one."""
        shape = source.meta["val"].shape
        return [s if isinstance(s, int) else self.call(like, aten.sym_size.int, source, d) for d, s in enumerate(shape)]

    def _passes_gradient(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if node.op != "call_function" or node.meta.get("no_grad") or node.target is aten.detach.default:
            return False
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            return False
        return any(a in self.differentiable for a in node.all_input_nodes)


def fake_result(target: Any, args: Any, kwargs: Any) -> Any:
    """What a call would give, on the fake values of its arguments."""
    values = fx.map_arg((args, kwargs), lambda a: a.meta["val"])
    found: list[Any] = []
    fx.map_arg((args, kwargs), lambda a: found.append(a.meta["val"]))
    mode = next((v.fake_mode for v in found if isinstance(v, torch.Tensor)), None)  # type: ignore[attr-defined]
    if mode is None:
        return target(*values[0], **values[1])
    with mode, enable_python_dispatcher(), torch.no_grad():
        return target(*values[0], **values[1])
