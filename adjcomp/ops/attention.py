"""Causal self-attention of a chunk: its queries look at the keys of its own steps and at those of all earlier chunks.

What it carries has no fixed size: the keys and values of the whole sequence. They are read, never changed, and the cotangents
that later chunks send back to them are added up; so it has no outgoing state, and its caller keeps them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """y[t] = Σ_s p[t, s] v[s], p[t] the softmax over s <= t of scale q[t] · k[s], per head; s counts the steps of `past_k` too.

    Nothing of size (T, T) is held. Every G-th part of the heads shares keys and values.

    Args:
        q: (B, T, H, D). k: (B, T, G, D), v: (B, T, G, V), with H a multiple of G.
        past_k, past_v: (B, P, G, D) and (B, P, G, V), of the P >= 0 steps before; none when None.
        scale: 1/√D when None. window: how many steps a query looks at, its own included; all when None.

    Returns:
        y: (B, T, H, V), contiguous, in q's dtype.

    Raises:
        ValueError: shapes, heads, devices or a window that do not fit, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("causal_attention")
    check.tensor("q", q, "B T H D")
    check.tensor("k", k, "B T G D")
    check.tensor("v", v, "B T G V")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise check.error("k", f"of {k.shape[2]} heads", f"a number of heads that divides those of q, {q.shape[2]}")
    if (past_k is None) != (past_v is None):
        raise check.error("past_v", "given alone" if past_k is None else "missing", "past_k and past_v, or neither")
    check.optional("past_k", past_k, "B P G D")
    check.optional("past_v", past_v, "B P G V")
    if window is not None and window < 1:
        raise check.error("window", window, "at least 1 step, or None")
    factor = float(q.shape[3]) ** -0.5 if scale is None else float(scale)
    y: Tensor = call("causal_attention", q, k, v, past_k, past_v, factor, window)[0]
    return y


def _fake(
    q: Tensor, k: Tensor, v: Tensor, past_k: Tensor | None, past_v: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return empty(q, (*q.shape[:3], v.shape[3])), empty(q, tuple(q.shape[:3]), state_dtype(q, k, v))


def _fake_vjp(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor | None,
    past_v: Tensor | None,
    y: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int | None,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, q, k, v, past_k, past_v)


def _fake_add_vjp(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor,
    past_v: Tensor,
    y: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int | None,
    mask: list[bool],
    dpast_k: Tensor | None,
    dpast_v: Tensor | None,
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, q, k, v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    mask = list(ctx.needs_input_grad[:5])
    grads: tuple[Tensor | None, ...] = call("causal_attention_vjp", dy, *ctx.saved_tensors, *ctx.options, mask)
    return (*grads, None, None)


_QKV = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "float scale, int? window"
define(
    "causal_attention",
    f"({_QKV}, Tensor? past_k, Tensor? past_v, {_OPTIONS}) -> (Tensor y, Tensor normaliser)",
    _fake,
)
define(
    "causal_attention_vjp",
    f"(Tensor dy, {_QKV}, Tensor? past_k, Tensor? past_v, Tensor y, Tensor normaliser, {_OPTIONS}, bool[5] mask) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dpast_k, Tensor dpast_v)",
    _fake_vjp,
)
# The VJP that adds the cotangents of earlier keys and values to sums over chunks, of the dtype of the arithmetic.
define(
    "causal_attention_add_vjp",
    f"(Tensor dy, {_QKV}, Tensor past_k, Tensor past_v, Tensor y, Tensor normaliser, {_OPTIONS}, bool[3] mask, "
    "Tensor(a!)? dpast_k, Tensor(b!)? dpast_v) -> (Tensor dq, Tensor dk, Tensor dv)",
    _fake_add_vjp,
)
differentiate("causal_attention", _setup, _backward)
