"""Products of rows with one of several matrices, which each row names: the experts of a mixture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck, Kind
from adjcomp.ops.library import call, define, differentiate, empty, masked_like


def grouped_linear(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """y[n] = x[n] @ weight[group[n]].

    Args:
        x: (rows, in). weight: (groups, in, out), of x's dtype. group: (rows,), int64, from 0 to groups - 1.

    Returns:
        y: (rows, out), contiguous. A matrix that no row names gets zeros for a gradient.

    Raises:
        ValueError: shapes or devices that do not match. TypeError: a dtype that is not supported, or two of them. IndexError: a
        group past the last one.
    """
    check = ArgumentCheck("grouped_linear")
    check.tensor("x", x, "rows in")
    check.tensor("weight", weight, "groups in out")
    check.tensor("group", group, "rows", Kind.INDEX)
    if weight.dtype is not x.dtype:
        raise check.type_error("weight", weight.dtype, f"x's dtype, {x.dtype}")
    y: Tensor = call("grouped_linear", x, weight, group)
    return y


def _fake(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    return empty(x, (x.shape[0], weight.shape[2]))


def _fake_vjp(dy: Tensor, x: Tensor, weight: Tensor, group: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    return masked_like(mask, x, weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*call("grouped_linear_vjp", dy, *ctx.saved_tensors, list(ctx.needs_input_grad[:2])), None)


define("grouped_linear", "(Tensor x, Tensor weight, Tensor group) -> Tensor", _fake)
define(
    "grouped_linear_vjp",
    "(Tensor dy, Tensor x, Tensor weight, Tensor group, bool[2] mask) -> (Tensor dx, Tensor dweight)",
    _fake_vjp,
)
differentiate("grouped_linear", _setup, _backward)
