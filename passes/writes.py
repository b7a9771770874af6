"""What an in-place operation writes, as an operation that makes a new value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
Read = Callable[[fx.Node], fx.Node]


def written_value(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    """The new value of the first argument of `node`, in that argument's shape and dtype.

    Raises CaptureError for an operation that changes another argument, or that has no such form.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    recipe = _RECIPES.get(node.target) or _variant
    if changed != [schema.arguments[0].name] or not isinstance(node.args[0], fx.Node):
        raise CaptureError(
            f"{_place(node)}: {node.target} changes {', '.join(changed)} in place, and no form of it that does not is known"
        )
    return _fitted(emit, node, recipe(emit, node, read), read(node.args[0]))


def _place(node: fx.Node) -> str:
    return str(node.meta.get("where", "the root module"))


def _fitted(emit: Emitter, node: fx.Node, value: fx.Node, old: fx.Node) -> fx.Node:
    """An in-place operation keeps the shape and dtype of what it changes."""
    want, got = old.meta["val"], value.meta["val"]
    if got.dtype is not want.dtype:
        value = emit.call(node, aten._to_copy.default, value, dtype=want.dtype)
    if tuple(got.shape) != tuple(want.shape):
        value = emit.call(node, aten.expand.default, value, emit.sizes(node, old))
    return value


def _arguments(node: fx.Node, read: Read) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fx.map_arg((node.args, dict(node.kwargs)), read)  # type: ignore[return-value]


def mutates(node: fx.Node) -> bool:
    """Whether an operation changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def functional_form(node: fx.Node) -> Any:
    """`op` of the same overload for a call of `op_`. Raises CaptureError where there is none."""
    name = node.target._opname.removesuffix("_")  # type: ignore[union-attr]
    packet = getattr(torch.ops.aten, name, None)
    overload = node.target._overloadname  # type: ignore[union-attr]
    if packet is None or overload not in packet.overloads() or node.target.namespace != "aten":  # type: ignore[union-attr]
        raise CaptureError(f"{_place(node)}: {node.target} works in place, and no form of it that does not is known")
    return getattr(packet, overload)


def _variant(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    """`op_` becomes `op` of the same overload."""
    args, kwargs = _arguments(node, read)
    return emit.call(node, functional_form(node), *args, **kwargs)


def _copy(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    return read(node.args[1])  # type: ignore[arg-type]


def _zero(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    return emit.call(node, aten.zeros_like.default, read(node.args[0]))  # type: ignore[arg-type]


def _fill(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    return emit.call(node, aten.full_like.default, read(node.args[0]), node.args[1])  # type: ignore[arg-type]


def _bernoulli(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    return emit.call(node, aten.bernoulli.p, read(node.args[0]), argument(node, "p"))  # type: ignore[arg-type]


def _bernoulli_tensor(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    return emit.call(node, aten.bernoulli.default, read(node.args[1]))  # type: ignore[arg-type]


def _uniform(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    low, high = float(argument(node, "from")), float(argument(node, "to"))
    drawn = emit.call(node, aten.rand_like.default, read(node.args[0]))  # type: ignore[arg-type]
    return emit.call(node, aten.add.Tensor, emit.call(node, aten.mul.Tensor, drawn, high - low), low)


def _normal(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    drawn = emit.call(node, aten.randn_like.default, read(node.args[0]))  # type: ignore[arg-type]
    scaled = emit.call(node, aten.mul.Tensor, drawn, float(argument(node, "std")))
    return emit.call(node, aten.add.Tensor, scaled, float(argument(node, "mean")))


def _index_put(emit: Emitter, node: fx.Node, read: Read) -> fx.Node:
    """`x[mask] = number` is a choice at every place; other indices keep index_put."""
    indices, values = node.args[1], node.args[2]
    masks = [i for i in indices if i is not None]  # type: ignore[union-attr]
    whole, mask = read(node.args[0]), read(masks[0])  # type: ignore[arg-type]
    value = read(values)  # type: ignore[arg-type]
    leading = list(indices) == masks and len(masks) == 1 and mask.meta["val"].dtype is torch.bool  # type: ignore[arg-type]
    if not leading or value.meta["val"].ndim != 0 or argument(node, "accumulate"):
        return _variant(emit, node, read)
    for _ in range(whole.meta["val"].ndim - mask.meta["val"].ndim):
        mask = emit.call(node, aten.unsqueeze.default, mask, -1)
    return emit.call(node, aten.where.self, mask, value, whole)


_RECIPES: dict[Any, Callable[[Emitter, fx.Node, Read], fx.Node]] = {
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _copy,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli_tensor,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.index_put_.default: _index_put,
}
