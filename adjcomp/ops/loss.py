"""The head and its loss in one op, so that logits exist for one block of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck, Kind
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over valid rows of -log softmax(x weightᵀ)[label], and how many rows are valid.

    (B, T, V) is never held. Everything is summed in float32 (float64 for float64 inputs).

    Args:
        x: (B, T, D). weight: (V, D). labels: (B, T), int64 or int32; rows whose label is `ignore_index` do not count.
        logits_dtype: the dtype that logits are rounded to before the log-softmax. None keeps float32; x's dtype repeats what
            `lm_head(x).float()` gives in lower precision.

    Returns:
        loss_sum: scalar, float32 (float64 for float64 inputs). valid_count: scalar, int64.

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
        IndexError: a label outside [0, V) that is not `ignore_index`.
    """
    check = ArgumentCheck("linear_cross_entropy")
    check.tensor("x", x, "B T D")
    check.tensor("weight", weight, "V D")
    check.tensor("labels", labels, "B T", Kind.INTEGER)
    if logits_dtype is not None and logits_dtype not in Kind.REAL.value:
        raise check.type_error("logits_dtype", logits_dtype, f"None, {Kind.REAL.text}")
    loss_sum, valid_count, _ = call("linear_cross_entropy", x, weight, labels, ignore_index, logits_dtype)
    return loss_sum, valid_count


def _fake(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, logits_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = state_dtype(x, weight)
    return empty(x, (), wide), empty(x, (), torch.int64), empty(x, tuple(labels.shape), wide)


def _fake_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    ignore_index: int,
    logits_dtype: torch.dtype | None,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, x, weight)


def _fake_add_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    ignore_index: int,
    logits_dtype: torch.dtype | None,
    wants_dx: bool,
    dweight: Tensor,
) -> Tensor:
    return empty(x, tuple(x.shape) if wants_dx else (0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, labels, ignore_index, logits_dtype = inputs
    _, valid_count, normaliser = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(valid_count, normaliser)
    ctx.save_for_backward(x, weight, labels, normaliser)
    ctx.options = (ignore_index, logits_dtype)


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 5
    mask = list(ctx.needs_input_grad[:2])
    grads: tuple[Tensor | None, ...] = call("linear_cross_entropy_vjp", dloss, *ctx.saved_tensors, *ctx.options, mask)
    return (*grads, None, None, None)


_OPTIONS = "int ignore_index, ScalarType? logits_dtype"
define(
    "linear_cross_entropy",
    f"(Tensor x, Tensor weight, Tensor labels, {_OPTIONS}) -> (Tensor loss_sum, Tensor valid_count, Tensor normaliser)",
    _fake,
)
define(
    "linear_cross_entropy_vjp",
    f"(Tensor dloss, Tensor x, Tensor weight, Tensor labels, Tensor normaliser, {_OPTIONS}, bool[2] mask) -> "
    "(Tensor dx, Tensor dweight)",
    _fake_vjp,
)
# The VJP that adds the weight's cotangent to a sum over chunks, of the dtype of the arithmetic.
define(
    "linear_cross_entropy_add_vjp",
    f"(Tensor dloss, Tensor x, Tensor weight, Tensor labels, Tensor normaliser, {_OPTIONS}, bool wants_dx, "
    "Tensor(a!) dweight) -> Tensor dx",
    _fake_add_vjp,
)
differentiate("linear_cross_entropy", _setup, _backward)
