"""Root-mean-square normalisation as one op: what surrounds every mixer, in one pass over memory each way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467, eq. 4).

    Means are taken in float32 (float64 for float64 inputs); the normalised x is rounded to x's dtype before it meets the weight,
    as the models of the field do.

    Args:
        x: (..., D). weight: (D,), of x's dtype; None for ones. eps: added to the mean square.

    Returns:
        y: like x, contiguous.

    Raises:
        ValueError: shapes or devices that do not match. TypeError: a dtype that is not supported, or two of them.
    """
    check = ArgumentCheck("rms_norm")
    letters = [f"D{i}" for i in range(x.dim() - 1)]
    check.tensor("x", x, " ".join([*letters, "D"]))
    check.optional("weight", weight, "D")
    if weight is not None and weight.dtype is not x.dtype:
        raise check.type_error("weight", weight.dtype, f"x's dtype, {x.dtype}")
    y: Tensor = call("rms_norm", x, weight, eps)[0]
    return y


def _fake(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return empty(x, tuple(x.shape)), empty(x, tuple(x.shape[:-1]), state_dtype(x))


def _fake_vjp(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, scale: Tensor, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, x, weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    x, weight, scale = ctx.saved_tensors
    mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1] and weight is not None]
    return (*call("rms_norm_vjp", dy, None, x, weight, scale, mask), None)


define("rms_norm", "(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor scale)", _fake)
# dresidual: what else flows into x, added to dx on the way.
define(
    "rms_norm_vjp",
    "(Tensor dy, Tensor? dresidual, Tensor x, Tensor? weight, Tensor scale, bool[2] mask) -> (Tensor dx, Tensor dweight)",
    _fake_vjp,
)
differentiate("rms_norm", _setup, _backward)
