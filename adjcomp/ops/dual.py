"""The state-space dual of Mamba-2: one scalar decay per head and step, states of P x N, B and C shared by groups of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck
from adjcomp.ops.library import call, checkpoint_count, define, differentiate, empty, masked_like, state_dtype

CHECKPOINT_STEPS = 64  # one P x N state kept per head and this many steps


def ssd(
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
    dt_limit: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """h[t] = exp(δ[t] A) h[t-1] + δ[t] x[t] B[t]ᵀ;  y[t] = (h[t] C[t] + D x[t]) silu(z[t]), per head.

    δ = dt + dt_bias, passed through softplus where `dt_softplus` is True, then clamped to `dt_limit`.

    Args:
        x, z: (batch, T, H, P). dt: (batch, T, H). A, D, dt_bias: (H,). B, C: (batch, T, G, N) with H a multiple of G.
        h0: (batch, H, P, N), zeros when None. dt_limit: (low, high) or None.

    Returns:
        y: (batch, T, H, P), contiguous, in x's dtype.
        h_last: (batch, H, P, N), float32, or float64 where an input is float64.

    Raises:
        ValueError: shapes, groups, devices or limits that do not match, or T = 0. TypeError: a dtype that is not supported.
    """
    _check(x, dt, A, B, C, D, z, h0, dt_bias)
    limit = None if dt_limit is None else [float(bound) for bound in dt_limit]
    if limit is not None and (len(limit) != 2 or not limit[0] <= limit[1]):
        raise ArgumentCheck("ssd").error("dt_limit", tuple(limit), "(low, high) with low <= high, or None")
    y, h_last, _ = call("ssd", x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus, limit)
    return y, h_last


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    h0: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    check = ArgumentCheck("ssd")
    check.tensor("x", x, "batch T H P")
    check.tensor("dt", dt, "batch T H")
    check.tensor("A", A, "H")
    check.tensor("B", B, "batch T G N")
    check.tensor("C", C, "batch T G N")
    if int(x.shape[2]) % max(1, int(B.shape[2])) or B.shape[2] == 0:
        raise check.error("B", f"of {B.shape[2]} groups for {x.shape[2]} heads", "a number of groups that divides the heads")
    check.optional("D", D, "H")
    check.optional("z", z, "batch T H P")
    check.optional("dt_bias", dt_bias, "H")
    check.optional("h0", h0, "batch H P N")


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
    dt_limit: list[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, heads, width = x.shape
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    state = (heads, width, B.shape[3])
    kept = (batch, checkpoint_count(steps, CHECKPOINT_STEPS), *state)
    return empty(x, tuple(x.shape)), empty(x, (batch, *state), wide), empty(x, kept, wide)


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
    dt_limit: list[float] | None,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    dh0 = empty(states, (states.shape[0], *states.shape[2:])) if mask[8] else None
    return (*masked_like(mask[:8], x, dt, A, B, C, D, z, dt_bias), dh0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, dt_softplus, dt_limit = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])
    ctx.options = (dt_softplus, dt_limit)


def _backward(ctx: Any, dy: Tensor | None, dh_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:9])
    grads: tuple[Tensor | None, ...] = call("ssd_vjp", dy, dh_last, *ctx.saved_tensors, *ctx.options, mask)
    return (*grads, None, None)


_INPUTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
_OPTIONS = "bool dt_softplus, float[]? dt_limit"
define("ssd", f"({_INPUTS}, Tensor? h0, {_OPTIONS}) -> (Tensor y, Tensor h_last, Tensor states)", _fake)
define(
    "ssd_vjp",
    f"(Tensor? dy, Tensor? dh_last, {_INPUTS}, Tensor states, {_OPTIONS}, bool[9] mask) -> "
    "(Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dh0)",
    _fake_vjp,
)
differentiate("ssd", _setup, _backward)
