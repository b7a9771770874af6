"""First-order linear recurrences: elementwise (`linear_scan`, real or complex) and with a matrix per step (`dense_scan`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck, Kind
from adjcomp.ops.library import call, define, differentiate, empty, masked_like, state_dtype


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h[t] = a[t] h[t-1] + b[t], elementwise.

    Args:
        a: decays, (B, T, *S), real or complex.
        b: inputs, (B, T, *S), real or complex.
        h0: state before the first step, (B, *S); zeros when None.

    Returns:
        h: (B, T, *S), contiguous, in the promoted dtype of `a` and `b`.
        h_last: (B, *S), the state after the last step, float32 (float64 for float64 inputs, complex likewise).

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("linear_scan")
    if isinstance(a, Tensor) and a.dim() < 2:
        raise check.error("a", f"of shape {tuple(a.shape)}", "(B, T, *S)")
    inner = " ".join(f"S{i}" for i in range(a.dim() - 2)) if isinstance(a, Tensor) else "*S"
    check.tensor("a", a, f"B T {inner}", Kind.REAL_OR_COMPLEX)
    check.tensor("b", b, f"B T {inner}", Kind.REAL_OR_COMPLEX)
    check.optional("h0", h0, f"B {inner}", Kind.REAL_OR_COMPLEX)
    a, b, h0 = _common_field(a, b, h0)
    h, h_last = call("linear_scan", a, b, h0)
    return h, h_last


def dense_scan(A: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h[t] = A[t] h[t-1] + b[t] with a full matrix per step.

    Args:
        A: transition matrices, (B, T, N, N), real or complex.
        b: inputs, (B, T, N).
        h0: state before the first step, (B, N); zeros when None.

    Returns:
        h: (B, T, N), contiguous, in the promoted dtype of `A` and `b`.
        h_last: (B, N), float32 (float64 for float64 inputs, complex likewise).

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("dense_scan")
    check.tensor("A", A, "B T N N", Kind.REAL_OR_COMPLEX)
    check.tensor("b", b, "B T N", Kind.REAL_OR_COMPLEX)
    check.optional("h0", h0, "B N", Kind.REAL_OR_COMPLEX)
    A, b, h0 = _common_field(A, b, h0)
    h, h_last = call("dense_scan", A, b, h0)
    return h, h_last


def _common_field(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make all arguments complex where one is; autograd takes the real part on the way back."""
    given = [t for t in (a, b, h0) if t is not None]
    if not any(t.is_complex() for t in given):
        return a, b, h0
    wide = state_dtype(*given)
    a, b = (t if t.is_complex() else t.to(wide) for t in (a, b))
    return a, b, (h0 if h0 is None or h0.is_complex() else h0.to(wide))


def _fake_scan(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = tuple(b.shape)
    return empty(b, shape, torch.promote_types(a.dtype, b.dtype)), empty(b, (shape[0], *shape[2:]), state_dtype(a, b, h0))


def _fake_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, a: Tensor, h: Tensor, h0: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    return masked_like(mask, a, h, h0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, _, h0 = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, output[0], h0)


def _backward(name: str) -> Any:
    def backward(ctx: Any, dh: Tensor | None, dh_last: Tensor | None) -> tuple[Tensor | None, ...]:
        a, h, h0 = ctx.saved_tensors
        grads: tuple[Tensor | None, ...] = call(name, dh, dh_last, a, h, h0, list(ctx.needs_input_grad))
        return grads

    return backward


# The output h holds every state that the VJP needs, so nothing else is kept. The cotangent of b comes in h's dtype.
for _name in ("linear_scan", "dense_scan"):
    define(_name, "(Tensor a, Tensor b, Tensor? h0) -> (Tensor h, Tensor h_last)", _fake_scan)
    define(
        f"{_name}_vjp",
        "(Tensor? dh, Tensor? dh_last, Tensor a, Tensor h, Tensor? h0, bool[3] mask) -> (Tensor da, Tensor db, Tensor dh0)",
        _fake_scan_vjp,
    )
    differentiate(_name, _setup, _backward(f"{_name}_vjp"))
