"""The causal depthwise convolution in front of most recurrences; what it carries is the tail, the last W - 1 inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t] = activation(Σ_w weight[:, w] x[t - W + 1 + w] + bias), per channel.

    Args:
        x: (B, T, D). weight: (D, W), the newest input last. bias: (D,).
        tail: (B, W - 1, D), the inputs before x, oldest first; zeros when None.
        activation: None or "silu".

    Returns:
        y: (B, T, D), contiguous, in x's dtype.
        tail_last: (B, W - 1, D), the last W - 1 inputs, float32 (exact), or float64 where an input is float64.

    Raises:
        ValueError: shapes or devices that do not match, T = 0, an unknown activation. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("causal_conv1d")
    check.tensor("x", x, "B T D")
    check.tensor("weight", weight, "D W")
    check.optional("bias", bias, "D")
    if weight.shape[1] < 1:
        raise check.error("weight", f"of shape {tuple(weight.shape)}", "(D, W) with W >= 1")
    check.bind("W-1", weight.shape[1] - 1)
    check.optional("tail", tail, "B W-1 D")
    if activation not in (None, "silu"):
        raise check.error("activation", repr(activation), 'None or "silu"')
    y, tail_last = call("causal_conv1d", x, weight, bias, tail, activation == "silu")
    return y, tail_last


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    batch, _, channels = x.shape
    last = empty(x, (batch, weight.shape[1] - 1, channels), state_dtype(x, weight, bias, tail))
    return empty(x, tuple(x.shape)), last


def _fake_vjp(
    dy: Tensor | None,
    dtail_last: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    silu: bool,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, x, weight, bias, tail)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])
    ctx.silu = inputs[4]


def _backward(ctx: Any, dy: Tensor | None, dtail_last: Tensor | None) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:4])
    grads: tuple[Tensor | None, ...] = call("causal_conv1d_vjp", dy, dtail_last, *ctx.saved_tensors, ctx.silu, mask)
    return (*grads, None)


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? tail, bool silu"
define("causal_conv1d", f"({_INPUTS}) -> (Tensor y, Tensor tail_last)", _fake)
define(
    "causal_conv1d_vjp",
    f"(Tensor? dy, Tensor? dtail_last, {_INPUTS}, bool[4] mask) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dtail)",
    _fake_vjp,
)
differentiate("causal_conv1d", _setup, _backward)
