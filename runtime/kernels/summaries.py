"""Summaries of a range of time by the ops themselves: on a CPU, and in float64 on a GPU.

An end state is that of the op from zeros. An adjoint end is what the op's VJP hands to the initial state, which depends on no
input but those given: the others are zeros there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.delta import CHECKPOINT_STEPS as DELTA_STEPS
from adjcomp.ops.dual import CHECKPOINT_STEPS as SSD_STEPS
from adjcomp.ops.library import call, checkpoint_count, state_dtype
from adjcomp.ops.selective import CHECKPOINT_STEPS as SELECTIVE_STEPS
from adjcomp.runtime.kernels.arithmetic import step_size

Summary = tuple[Tensor, Tensor]


def linear_scan_summary(a: Tensor, b: Tensor) -> Summary:
    """See `adjcomp.ops.linear_scan_summary`."""
    _, end = call("linear_scan", a, b, None)
    return a.to(end.dtype).prod(1), end


def linear_scan_adjoint_summary(dh: Tensor, a: Tensor) -> Summary:
    """The scan of time reversed: what leaves a step is conj(a) (μ + dh)."""
    back = a.to(state_dtype(a, dh)).conj().flip(1)
    _, end = call("linear_scan", back, back * dh.flip(1), None)
    return back.prod(1), end


def dense_scan_summary(A: Tensor, b: Tensor) -> Summary:
    """See `adjcomp.ops.dense_scan_summary`."""
    _, end = call("dense_scan", A, b, None)
    return _product(A.to(end.dtype)), end


def dense_scan_adjoint_summary(dh: Tensor, A: Tensor) -> Summary:
    """The scan of time reversed: what leaves a step is Aᴴ (μ + dh)."""
    back = A.to(state_dtype(A, dh)).mH.flip(1)
    _, end = call("dense_scan", back, (back @ dh.to(back.dtype).flip(1)[..., None])[..., 0], None)
    return _product(back), end


def _product(A: Tensor) -> Tensor:
    """A[T-1] … A[0] over dimension 1, by halves."""
    while A.shape[1] > 1:
        odd = A[:, -1:] if A.shape[1] % 2 else A[:, :0]
        paired = A[:, : A.shape[1] // 2 * 2]
        A = torch.cat([paired[:, 1::2] @ paired[:, ::2], odd], 1)
    return A[:, 0].contiguous()


def selective_scan_summary(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Summary:
    """See `adjcomp.ops.selective_scan_summary`."""
    _, end, _ = call("selective_scan", x, dt, A, B, B, None, None, dt_bias, None, dt_softplus)
    return torch.exp(step_size(dt.to(end.dtype), dt_bias, dt_softplus).sum(1)[..., None] * A), end


def selective_scan_adjoint_summary(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool
) -> Summary:
    """See `adjcomp.ops.selective_scan_adjoint_summary`."""
    wide = state_dtype(dy, dt, A, C, z, dt_bias)
    kept = int(checkpoint_count(dy.shape[1], SELECTIVE_STEPS))
    states = dy.new_zeros((dy.shape[0], kept, A.shape[1], A.shape[0]), dtype=wide)
    inputs = (torch.zeros_like(dy), dt, A, torch.zeros_like(C), C, None, z, dt_bias)
    *_, end = call("selective_scan_vjp", dy, None, *inputs, states, dt_softplus, [False] * 8 + [True])
    return torch.exp(step_size(dt.to(wide), dt_bias, dt_softplus).sum(1)[..., None] * A), end


def ssd_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: list[float] | None
) -> Summary:
    """See `adjcomp.ops.ssd_summary`."""
    _, end, _ = call("ssd", x, dt, A, B, B, None, None, dt_bias, None, dt_softplus, dt_limit)
    return torch.exp(step_size(dt.to(end.dtype), dt_bias, dt_softplus, dt_limit).sum(1) * A)[..., None, None], end


def ssd_adjoint_summary(
    dy: Tensor,
    dt: Tensor,
    A: Tensor,
    C: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: list[float] | None,
) -> Summary:
    """See `adjcomp.ops.ssd_adjoint_summary`."""
    batch, steps, heads, width = dy.shape
    wide = state_dtype(dy, dt, A, C, z, dt_bias)
    states = dy.new_zeros((batch, int(checkpoint_count(steps, SSD_STEPS)), heads, width, C.shape[3]), dtype=wide)
    inputs = (torch.zeros_like(dy), dt, A, torch.zeros_like(C), C, None, z, dt_bias)
    *_, end = call("ssd_vjp", dy, None, *inputs, states, dt_softplus, dt_limit, [False] * 8 + [True])
    return torch.exp(step_size(dt.to(wide), dt_bias, dt_softplus, dt_limit).sum(1) * A)[..., None, None], end


def gated_delta_rule_summary(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
    """The op from zeros, and without values from the identity."""
    _, end, _ = call("gated_delta_rule", q, k, v, g, beta, None)
    return _move(q, k, g, beta, end.dtype), end


def gated_delta_rule_adjoint_summary(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
    """See `adjcomp.ops.gated_delta_rule_adjoint_summary`."""
    batch, steps, heads, values = v.shape
    wide = state_dtype(dy, q, k, v, g, beta)
    states = v.new_zeros((batch, int(checkpoint_count(steps, DELTA_STEPS)), heads, k.shape[3], values), dtype=wide)
    *_, end = call("gated_delta_rule_vjp", dy, None, q, k, v, g, beta, states, [False] * 5 + [True])
    return _move(q, k, g, beta, wide).mT.contiguous(), end


def _move(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, wide: torch.dtype) -> Tensor:
    batch, _, heads, keys = k.shape
    identity = torch.eye(keys, dtype=wide, device=k.device).expand(batch, heads, keys, keys).contiguous()
    move: Tensor = call("gated_delta_rule", q, k, torch.zeros_like(k), g, beta, identity)[1]
    return move
