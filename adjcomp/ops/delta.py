"""The gated delta rule: linear attention whose state forgets by a decay and is corrected towards each new value."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, checkpoint_count, define, differentiate, empty, masked_like, state_dtype

CHECKPOINT_STEPS = 64  # one K x V state kept per head and this many steps


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S' = exp(g[t]) S[t-1];  S[t] = S' + β[t] k[t] (v[t] - S'ᵀ k[t])ᵀ;  y[t] = S[t]ᵀ q[t], per head.

    Neither a scale on q nor a normalisation of q and k is applied: do it before the call.

    Args:
        q, k: (batch, T, H, K). v: (batch, T, H, V). beta: (batch, T, H).
        g: log decay, (batch, T, H), or (batch, T, H, K) for a decay per key channel.
        h0: (batch, H, K, V), zeros when None.

    Returns:
        y: (batch, T, H, V), contiguous, in v's dtype.
        h_last: (batch, H, K, V), float32, or float64 where an input is float64.

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("gated_delta_rule")
    check.tensor("q", q, "batch T H K")
    check.tensor("k", k, "batch T H K")
    check.tensor("v", v, "batch T H V")
    if isinstance(g, Tensor) and g.dim() not in (3, 4):
        raise check.error("g", f"of shape {tuple(g.shape)}", "(batch, T, H) or (batch, T, H, K)")
    check.tensor("g", g, "batch T H" if isinstance(g, Tensor) and g.dim() == 3 else "batch T H K")
    check.tensor("beta", beta, "batch T H")
    check.optional("h0", h0, "batch H K V")
    y, h_last, _ = call("gated_delta_rule", q, k, v, g, beta, h0)
    return y, h_last


def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, heads, values = v.shape
    wide = state_dtype(q, k, v, g, beta, h0)
    state = (heads, k.shape[3], values)
    kept = (batch, checkpoint_count(steps, CHECKPOINT_STEPS), *state)
    return empty(v, tuple(v.shape)), empty(v, (batch, *state), wide), empty(v, kept, wide)


def _fake_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    dh0 = empty(states, (states.shape[0], *states.shape[2:])) if mask[5] else None
    return (*masked_like(mask[:5], q, k, v, g, beta), dh0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:5], output[2])


def _backward(ctx: Any, dy: Tensor | None, dh_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad)
    grads: tuple[Tensor | None, ...] = call("gated_delta_rule_vjp", dy, dh_last, *ctx.saved_tensors, mask)
    return grads


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
define("gated_delta_rule", f"({_INPUTS}, Tensor? h0) -> (Tensor y, Tensor h_last, Tensor states)", _fake)
define(
    "gated_delta_rule_vjp",
    f"(Tensor? dy, Tensor? dh_last, {_INPUTS}, Tensor states, bool[6] mask) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dh0)",
    _fake_vjp,
)
differentiate("gated_delta_rule", _setup, _backward)
