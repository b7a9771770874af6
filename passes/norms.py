"""Root-mean-square norms as one op, written in models as a power, a mean, an inverse root and products; and, in a VJP, the sum
of their input's cotangent with what else flows there.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from adjcomp.passes.emitting import Emitter
from adjcomp.passes.timearguments import argument

aten = torch.ops.aten
RMS_NORM = torch.ops.adjcomp.rms_norm.default
RMS_NORM_VJP = torch.ops.adjcomp.rms_norm_vjp.default


@dataclass(frozen=True)
class _Norm:
    """result = rms_norm(x, weight, eps)."""

    result: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float


def fuse_rms_norms(graph: fx.Graph) -> None:
    """`x · rsqrt(mean(x²) + eps)`, in float32 where x is narrower, then times a weight, becomes `rms_norm`."""
    for root in list(graph.find_nodes(op="call_function", target=aten.rsqrt.default)):
        found = _match(root)
        if found is None:
            continue
        emit = Emitter(graph, set())
        with graph.inserting_before(found.result):
            fused = emit.call(found.result, RMS_NORM, found.x, found.weight, found.eps)
            y = emit.call(found.result, operator.getitem, fused, 0)
        found.result.replace_all_uses_with(y)


def _match(root: fx.Node) -> _Norm | None:
    shifted = _input(root)
    if shifted.target not in (aten.add.Tensor, aten.add.Scalar) or not isinstance(shifted.args[1], int | float):
        return None
    wide = _squared(_input(shifted))
    if wide is None or not wide.meta["val"].is_floating_point():
        return None
    result = _sole_user(root, aten.mul.Tensor)
    if result is None or set(result.args) != {wide, root}:
        return None
    x, narrow = wide, _sole_user(result, aten._to_copy.default)
    if narrow is not None and _is_narrowed(wide, narrow):
        x, result = _input(wide), narrow
    gained = _sole_user(result, aten.mul.Tensor)
    weight = None if gained is None else _weight(gained, result)
    if gained is not None and weight is not None:
        result = gained
    if bool(root.meta.get("no_grad")) is not bool(result.meta.get("no_grad")):
        return None
    return _Norm(result, x, weight, float(shifted.args[1]))


def _input(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _squared(mean: fx.Node) -> fx.Node | None:
    """v of a mean(v², last dimension, keepdim)."""
    if mean.target is not aten.mean.dim or argument(mean, "keepdim") is not True or argument(mean, "dtype") is not None:
        return None
    squares = _input(mean)
    dims: Any = argument(mean, "dim")
    if [d % squares.meta["val"].ndim for d in dims] != [squares.meta["val"].ndim - 1]:
        return None
    if squares.target is aten.pow.Tensor_Scalar and squares.args[1] == 2:
        return _input(squares)
    same = squares.target is aten.mul.Tensor and squares.args[0] is squares.args[1]
    return _input(squares) if same else None


def _sole_user(node: fx.Node, target: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _is_narrowed(wide: fx.Node, narrow: fx.Node) -> bool:
    """Whether `wide` is a cast of a narrower value, and `narrow` a cast back to its dtype."""
    if wide.target is not aten._to_copy.default:
        return False
    return bool(_input(wide).meta["val"].dtype is narrow.meta["val"].dtype)


def _weight(gained: fx.Node, normal: fx.Node) -> fx.Node | None:
    """What `normal` is multiplied with, where it has one number for each channel and the same dtype."""
    others = [a for a in gained.args if a is not normal]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    value, like = others[0].meta["val"], normal.meta["val"]
    fits = isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype is like.dtype
    return others[0] if fits and value.shape[0] == like.shape[-1] else None


def add_residual_cotangents(graph: fx.Graph) -> None:
    """`r + dx` of a norm's VJP, where r is known before it, becomes its argument `dresidual`."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for vjp in graph.find_nodes(op="call_function", target=RMS_NORM_VJP):
        dx = next((user for user in vjp.users if user.target is operator.getitem and user.args[1] == 0), None)
        total = None if dx is None or vjp.args[1] is not None else _sole_user(dx, aten.add.Tensor)
        if dx is None or total is None or total.kwargs:
            continue
        others = [a for a in total.args if a is not dx]
        if len(others) != 1 or not isinstance(others[0], fx.Node) or order[others[0]] > order[vjp]:
            continue
        residual, value = others[0], dx.meta["val"]
        if residual.meta["val"].dtype is not value.dtype or residual.meta["val"].shape != value.shape:
            continue
        vjp.update_arg(1, residual)
        total.replace_all_uses_with(dx)
        graph.erase_node(total)
