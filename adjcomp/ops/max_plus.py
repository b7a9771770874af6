"""The running maximum that stabilises exponential gates: a linear recurrence of the (max, +) semiring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, define, differentiate, empty, state_dtype


def max_plus_scan(a: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h[t] = max(a[t] + h[t-1], b[t]), elementwise. At a tie both sides get half of the gradient, as from `torch.maximum`.

    Args:
        a, b: (B, T, *S), real.
        h0: state before the first step, (B, *S); zeros when None.

    Returns:
        h: (B, T, *S), contiguous, in the promoted dtype of `a` and `b`.
        h_last: (B, *S), float32, or float64 where an input is float64.

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("max_plus_scan")
    if isinstance(a, Tensor) and a.dim() < 2:
        raise check.error("a", f"of shape {tuple(a.shape)}", "(B, T, *S)")
    inner = " ".join(f"S{i}" for i in range(a.dim() - 2)) if isinstance(a, Tensor) else "*S"
    check.tensor("a", a, f"B T {inner}")
    check.tensor("b", b, f"B T {inner}")
    check.optional("h0", h0, f"B {inner}")
    h, h_last, _ = call("max_plus_scan", a, b, h0)
    return h, h_last


def _fake(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    shape = tuple(b.shape)
    state = empty(b, (shape[0], *shape[2:]), state_dtype(a, b, h0))
    return empty(b, shape, torch.promote_types(a.dtype, b.dtype)), state, empty(b, shape, torch.int8)


def _fake_vjp(dh: Tensor | None, dh_last: Tensor | None, picks: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    wide, shape = state_dtype(dh, dh_last), tuple(picks.shape)
    shapes = (shape, shape, (shape[0], *shape[2:]))
    return tuple(empty(picks, s, wide) if keep else None for s, keep in zip(shapes, mask, strict=True))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, dh: Tensor | None, dh_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = call("max_plus_scan_vjp", dh, dh_last, *ctx.saved_tensors, list(ctx.needs_input_grad))
    return grads


# picks: 2 where h[t] comes from h[t-1], 0 where it comes from b[t], 1 at a tie. The cotangents come in the state's dtype.
define("max_plus_scan", "(Tensor a, Tensor b, Tensor? h0) -> (Tensor h, Tensor h_last, Tensor picks)", _fake)
define(
    "max_plus_scan_vjp",
    "(Tensor? dh, Tensor? dh_last, Tensor picks, bool[3] mask) -> (Tensor da, Tensor db, Tensor dh0)",
    _fake_vjp,
)
differentiate("max_plus_scan", _setup, _backward)
