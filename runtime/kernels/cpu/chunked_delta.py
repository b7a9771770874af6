"""Torch form of the gated delta rule, step by step over all heads at once; the VJP rebuilds one block of states at a time.

Legend: b batch, h heads, k key channels, v value channels, t time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.delta import CHECKPOINT_STEPS
from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like


@dataclass(frozen=True)
class _Step:
    """One step's inputs in the wide dtype; the decay broadcasts over the state (b, h, k, v)."""

    q_bhk: Tensor
    k_bhk: Tensor
    v_bhv: Tensor
    decay: Tensor
    beta_bh1: Tensor


def _step(t: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, wide: torch.dtype) -> _Step:
    decay = torch.exp(g[:, t].to(wide))
    shaped = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
    return _Step(q[:, t].to(wide), k[:, t].to(wide), v[:, t].to(wide), shaped, beta[:, t].to(wide)[..., None])


def _left(row: Tensor, matrix: Tensor) -> Tensor:
    """rowᵀ matrix over the last two dimensions."""
    return (row[..., None, :] @ matrix)[..., 0, :]


def _outer(column: Tensor, row: Tensor) -> Tensor:
    return column[..., :, None] * row[..., None, :]


def _advance(step: _Step, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decayed state, the error v - S'ᵀ k, and the state after the step."""
    decayed = step.decay * state
    error = step.v_bhv - _left(step.k_bhk, decayed)
    return decayed, error, decayed + _outer(step.k_bhk, step.beta_bh1 * error)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.gated_delta_rule`; also returns the states before each block and after the last, (b, block, h, k, v)."""
    wide = state_dtype(q, k, v, g, beta, h0)
    batch, length, heads, values = v.shape
    state = v.new_zeros((batch, heads, k.shape[3], values), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    kept = []
    for t in range(length):
        if t % CHECKPOINT_STEPS == 0:
            kept.append(state)
        step = _step(t, q, k, v, g, beta, wide)
        state = _advance(step, state)[2]
        y[:, t] = _left(step.q_bhk, state)
    return y, state.clone(memory_format=torch.contiguous_format), torch.stack([*kept, state], 1)


def gated_delta_rule_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Walks the blocks backwards; each block's states are rebuilt from the one before it."""
    wide = states.dtype
    inputs = [q, k, v, g, beta]
    sums = [torch.empty(t.shape, dtype=wide, device=v.device) for t in inputs]
    lam = torch.zeros_like(states[:, 0]) if dh_last is None else dh_last.to(wide)
    for index in reversed(range(states.shape[1] - 1)):
        start, stop = index * CHECKPOINT_STEPS, min(v.shape[1], (index + 1) * CHECKPOINT_STEPS)
        before = [states[:, index]]
        steps = [_step(t, q, k, v, g, beta, wide) for t in range(start, stop)]
        for step in steps[:-1]:
            before.append(_advance(step, before[-1])[2])
        for t in reversed(range(start, stop)):
            dy_bhv = None if dy is None else dy[:, t].to(wide)
            grads, lam = _step_vjp(steps[t - start], before[t - start], lam, dy_bhv, g.dim() == 3)
            for total, grad in zip(sums, grads, strict=True):
                total[:, t] = grad
    return (*cast_like([*sums], [*inputs], mask[:5]), lam if mask[5] else None)


def _step_vjp(
    step: _Step, state: Tensor, lam: Tensor, dy: Tensor | None, scalar_decay: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Cotangents of (q, k, v, g, beta) of one step, and the adjoint state before it; `state` is the state before the step."""
    decayed, error, after = _advance(step, state)
    dq = torch.zeros_like(step.q_bhk)
    if dy is not None:
        dq = (after @ dy[..., None])[..., 0]
        lam = lam + _outer(step.q_bhk, dy)
    written = step.beta_bh1 * error
    dwritten = _left(step.k_bhk, lam)
    derror = step.beta_bh1 * dwritten
    dk = (lam @ written[..., None] - decayed @ derror[..., None])[..., 0]
    ddecayed = lam - _outer(step.k_bhk, derror)
    dg = (ddecayed * decayed).sum((-2, -1) if scalar_decay else -1)
    return (dq, dk, derror, dg, (dwritten * error).sum(-1)), step.decay * ddecayed
