"""A running log-sum-exp: recurrences with positive terms, in log space (as in minGRU and minLSTM, arXiv 2410.01201)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def logcumsumexp(x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y[t] = log(s + Σ_{r <= t} exp(x[r])), elementwise, where s = n·exp(m) is what came before.

    Args:
        x: (B, T, *S), real.
        state: (B, *S, 2), the pair (m, n) of what came before; n = 0, as in zeros, says that nothing did. None: nothing.

    Returns:
        y: (B, T, *S), contiguous, in x's dtype.
        state_last: (B, *S, 2), the pair (y[T - 1], 1), float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("logcumsumexp")
    if isinstance(x, Tensor) and x.dim() < 2:
        raise check.error("x", f"of shape {tuple(x.shape)}", "(B, T, *S)")
    inner = " ".join(f"S{i}" for i in range(x.dim() - 2)) if isinstance(x, Tensor) else "*S"
    check.tensor("x", x, f"B T {inner}")
    check.bind("2", 2)
    check.optional("state", state, f"B {inner} 2")
    y, state_last = call("logcumsumexp", x, state)
    return y.to(x.dtype), state_last


def _fake(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    wide, shape = state_dtype(x, state), tuple(x.shape)
    return empty(x, shape, wide), empty(x, (shape[0], *shape[2:], 2), wide)


def _fake_vjp(
    dy: Tensor | None, dstate_last: Tensor | None, x: Tensor, y: Tensor, state: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, x, state)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[0], state)


def _backward(ctx: Any, dy: Tensor | None, dstate_last: Tensor | None) -> tuple[Tensor | None, ...]:
    x, y, state = ctx.saved_tensors
    grads: tuple[Tensor | None, ...] = call("logcumsumexp_vjp", dy, dstate_last, x, y, state, list(ctx.needs_input_grad))
    return grads


# The output y is as wide as the state: the VJP takes differences of it, and the public function rounds it.
define("logcumsumexp", "(Tensor x, Tensor? state) -> (Tensor y, Tensor state_last)", _fake)
define(
    "logcumsumexp_vjp",
    "(Tensor? dy, Tensor? dstate_last, Tensor x, Tensor y, Tensor? state, bool[2] mask) -> (Tensor dx, Tensor dstate)",
    _fake_vjp,
)
differentiate("logcumsumexp", _setup, _backward)
