"""The selective scan of Mamba: a diagonal recurrence per channel with N states, whose decay depends on the step size."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, checkpoint_count, define, differentiate, empty, masked_like, state_dtype

CHECKPOINT_STEPS = 32  # one state kept per this many steps: small beside x, and 32 rebuilt states of a channel block fit in L1/L2


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """h[t] = exp(δ[t] A) h[t-1] + δ[t] x[t] B[t];  y[t] = (C[t] · h[t] + D x[t]) silu(z[t]).

    δ = dt + dt_bias, passed through softplus where `dt_softplus` is True.

    Args:
        x, dt, z: (batch, T, D). A: (D, N). B, C: (batch, T, N). D, dt_bias: (D,). h0: (batch, D, N), zeros when None.

    Returns:
        y: (batch, T, D), contiguous, in x's dtype.
        h_last: (batch, D, N), float32, or float64 where an input is float64.

    Raises:
        ValueError: shapes or devices that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    check = ArgumentCheck("selective_scan")
    check.tensor("x", x, "batch T D")
    check.tensor("dt", dt, "batch T D")
    check.tensor("A", A, "D N")
    check.tensor("B", B, "batch T N")
    check.tensor("C", C, "batch T N")
    check.optional("D", D, "D")
    check.optional("z", z, "batch T D")
    check.optional("dt_bias", dt_bias, "D")
    check.optional("h0", h0, "batch D N")
    y, h_last, _ = call("selective_scan", x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus)
    return y, h_last


def _fake(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, channels = x.shape
    states = A.shape[1]
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    kept = (batch, checkpoint_count(steps, CHECKPOINT_STEPS), states, channels)
    return empty(x, tuple(x.shape)), empty(x, (batch, channels, states), wide), empty(x, kept, wide)


def _fake_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    dt_softplus: bool,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    dh0 = empty(states, (x.shape[0], *A.shape)) if mask[8] else None
    return (*masked_like(mask[:8], x, dt, A, B, C, D, z, dt_bias), dh0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, dt_softplus = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])
    ctx.dt_softplus = dt_softplus


def _backward(ctx: Any, dy: Tensor | None, dh_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:9])
    grads: tuple[Tensor | None, ...] = call("selective_scan_vjp", dy, dh_last, *ctx.saved_tensors, ctx.dt_softplus, mask)
    return (*grads, None)


_INPUTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
define("selective_scan", f"({_INPUTS}, Tensor? h0, bool dt_softplus) -> (Tensor y, Tensor h_last, Tensor states)", _fake)
define(
    "selective_scan_vjp",
    f"(Tensor? dy, Tensor? dh_last, {_INPUTS}, Tensor states, bool dt_softplus, bool[9] mask) -> "
    "(Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dh0)",
    _fake_vjp,
)
differentiate("selective_scan", _setup, _backward)
