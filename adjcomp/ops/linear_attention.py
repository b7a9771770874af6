"""Linear attention with a decay per head and step: the state sums what each step writes along its key, and forgets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, checkpoint_count, define, differentiate, empty, masked_like, state_dtype

CHECKPOINT_STEPS = 64  # one K x V state kept per head and this many steps


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S[t] = exp(g[t]) S[t-1] + k[t] v[t]ᵀ;  y[t] = S[t]ᵀ q[t], per head. Nothing is scaled or normalised.

    Args:
        q, k: (batch, T, H, K). v: (batch, T, H, V). g: log decay, (batch, T, H). h0: (batch, H, K, V), zeros when None.

    Returns:
        y: (batch, T, H, V), contiguous, in v's dtype.
        h_last: (batch, H, K, V), float32, or float64 where an input is float64.

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("linear_attention")
    check.tensor("q", q, "batch T H K")
    check.tensor("k", k, "batch T H K")
    check.tensor("v", v, "batch T H V")
    check.tensor("g", g, "batch T H")
    check.optional("h0", h0, "batch H K V")
    y, h_last, _ = call("linear_attention", q, k, v, g, h0)
    return y, h_last


def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, heads, values = v.shape
    wide = state_dtype(q, k, v, g, h0)
    state = (heads, k.shape[3], values)
    kept = (batch, checkpoint_count(steps, CHECKPOINT_STEPS), *state)
    return empty(v, tuple(v.shape)), empty(v, (batch, *state), wide), empty(v, kept, wide)


def _fake_vjp(
    dy: Tensor | None, dh_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    dh0 = empty(states, (states.shape[0], *states.shape[2:])) if mask[4] else None
    return (*masked_like(mask[:4], q, k, v, g), dh0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:4], output[2])


def _backward(ctx: Any, dy: Tensor | None, dh_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad)
    grads: tuple[Tensor | None, ...] = call("linear_attention_vjp", dy, dh_last, *ctx.saved_tensors, mask)
    return grads


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g"
define("linear_attention", f"({_INPUTS}, Tensor? h0) -> (Tensor y, Tensor h_last, Tensor states)", _fake)
define(
    "linear_attention_vjp",
    f"(Tensor? dy, Tensor? dh_last, {_INPUTS}, Tensor states, bool[5] mask) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dh0)",
    _fake_vjp,
)
differentiate("linear_attention", _setup, _backward)
