"""Chunked torch form of SSD (Dao and Gu 2024): attention-like products inside a chunk of steps, one state between chunks.

Sums of log decays are kept in float64: their differences are exponents, and float32 sums over a chunk would cost a digit.

Legend: b batch, q (and j) steps of a chunk, h heads, p channels of a head, g groups, n states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.dual import CHECKPOINT_STEPS
from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like, silu_vjp, slot, step_size, step_size_vjp


@dataclass(frozen=True)
class _Chunk:
    """One chunk in the wide dtype, heads in front of steps, and the decays between its steps."""

    x_bhqp: Tensor
    delta_bhq: Tensor
    B_bhqn: Tensor
    C_bhqn: Tensor
    u_bhqp: Tensor  # δ x
    since_bhq: Tensor  # decay from the state before the chunk to step q
    until_bhq: Tensor  # decay from step q to the end of the chunk
    whole_bh: Tensor  # decay over the chunk
    decay_bhqj: Tensor  # decay from step j to step q, 0 for j > q
    mix_bhqj: Tensor  # C[q] · B[j] times that decay


def _chunk(steps: slice, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, wide: torch.dtype) -> _Chunk:
    heads = x.shape[2]
    x_bhqp = x[:, steps].to(wide).transpose(1, 2)
    B_bhqn, C_bhqn = (t[:, steps].to(wide).repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (B, C))
    delta_bhq = delta[:, steps].transpose(1, 2)
    log = (delta_bhq.double() * A.double()[:, None]).cumsum(-1)
    size = log.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    gaps = (log[..., :, None] - log[..., None, :]).masked_fill_(~below, -torch.inf)
    decay = gaps.to(wide).exp_()
    since, until, whole = log.to(wide).exp(), (log[..., -1:] - log).to(wide).exp(), log[..., -1].to(wide).exp()
    mix = (C_bhqn @ B_bhqn.mT).mul_(decay).masked_fill_(~below, 0)
    return _Chunk(x_bhqp, delta_bhq, B_bhqn, C_bhqn, delta_bhq[..., None] * x_bhqp, since, until, whole, decay, mix)


def ssd(
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
    """See `adjcomp.ops.ssd`; also returns the states before each chunk and after the last, (b, chunk, h, p, n)."""
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    batch, length, heads, width = x.shape
    h = x.new_zeros((batch, heads, width, B.shape[3]), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    delta = step_size(dt.to(wide), None if dt_bias is None else dt_bias.to(wide), dt_softplus, dt_limit)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = [h]
    for start in range(0, length, CHECKPOINT_STEPS):
        steps = slice(start, min(length, start + CHECKPOINT_STEPS))
        chunk = _chunk(steps, x, delta, A, B, C, wide)
        out = _outputs(chunk, h, D)
        out = out if z is None else out * torch.nn.functional.silu(z[:, steps].to(wide).transpose(1, 2))
        y[:, steps] = out.transpose(1, 2)
        h = chunk.whole_bh[..., None, None] * h + (chunk.u_bhqp * chunk.until_bhq[..., None]).mT @ chunk.B_bhqn
        kept.append(h)
    return y, h.clone(memory_format=torch.contiguous_format), torch.stack(kept, 1)


def _outputs(chunk: _Chunk, h: Tensor, D: Tensor | None) -> Tensor:
    """Outputs before the gate, (b, h, q, p), from the state before the chunk."""
    out = chunk.mix_bhqj @ chunk.u_bhqp + chunk.since_bhq[..., None] * (chunk.C_bhqn @ h.mT)
    return out if D is None else out + D.to(out.dtype)[:, None, None] * chunk.x_bhqp


def ssd_vjp(
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
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Walks the chunks backwards; each is rebuilt from the state before it."""
    wide = states.dtype
    raw, bias = dt.to(wide), None if dt_bias is None else dt_bias.to(wide)
    delta = step_size(raw, bias, dt_softplus, dt_limit)
    inputs = [x, dt, A, B, C, D, z, dt_bias]
    sums = [None if t is None else torch.zeros(t.shape, dtype=wide, device=x.device) for t in inputs]
    lam = torch.zeros_like(states[:, 0]) if dh_last is None else dh_last.to(wide)
    for index in reversed(range(states.shape[1] - 1)):
        steps = slice(index * CHECKPOINT_STEPS, min(x.shape[1], (index + 1) * CHECKPOINT_STEPS))
        chunk = _chunk(steps, x, delta, A, B, C, wide)
        dout = torch.zeros_like(chunk.x_bhqp) if dy is None else dy[:, steps].to(wide).transpose(1, 2)
        if z is not None:
            gate = z[:, steps].to(wide).transpose(1, 2)
            slot(sums, 6)[:, steps] = silu_vjp(dout * _outputs(chunk, states[:, index], D), gate).transpose(1, 2)
            dout = dout * torch.nn.functional.silu(gate)
        lam = _chunk_vjp(chunk, steps, states[:, index], lam, dout, A, D, sums)
    slot(sums, 1).copy_(step_size_vjp(slot(sums, 1), raw, bias, dt_softplus, dt_limit))
    if sums[7] is not None:
        sums[7] = slot(sums, 1).sum((0, 1))
    return (*cast_like(sums, list(inputs), mask[:8]), lam if mask[8] else None)


def _chunk_vjp(
    c: _Chunk, steps: slice, h: Tensor, lam: Tensor, dout: Tensor, A: Tensor, D: Tensor | None, sums: list[Tensor | None]
) -> Tensor:
    """Adds the chunk's cotangents to `sums` (x, δ, A, B, C, D, …) and returns the adjoint state before it."""
    dmix = dout @ c.u_bhqp.mT
    scores = dmix * c.decay_bhqj  # cotangent of C[q] · B[j]
    carried = c.until_bhq[..., None] * (c.B_bhqn @ lam.mT)  # what λ adds to the cotangent of u
    du = c.mix_bhqj.mT @ dout + carried
    seen = c.since_bhq[..., None] * dout
    dC = scores @ c.B_bhqn + seen @ h
    dB = scores.mT @ c.C_bhqn + (c.until_bhq[..., None] * c.u_bhqp) @ lam
    dlog = _log_decay_vjp(c, dmix * c.mix_bhqj, (seen * (c.C_bhqn @ h.mT)).sum(-1), (c.u_bhqp * carried).sum(-1), h, lam)
    ddelta = dlog * A.double()[:, None] + (du * c.x_bhqp).sum(-1)
    dx = c.delta_bhq[..., None] * du
    if D is not None:
        dx = dx + D.to(dx.dtype)[:, None, None] * dout
        slot(sums, 5).add_((dout * c.x_bhqp).sum((0, 2, 3)))
    groups = slot(sums, 3).shape[2]
    slot(sums, 0)[:, steps] = dx.transpose(1, 2)
    slot(sums, 1)[:, steps] = ddelta.to(dx.dtype).transpose(1, 2)
    slot(sums, 2).add_((dlog * c.delta_bhq).sum((0, 2)).to(dx.dtype))
    for index, grad in ((3, dB), (4, dC)):
        slot(sums, index)[:, steps] = grad.unflatten(1, (groups, -1)).sum(2).transpose(1, 2)
    return c.whole_bh[..., None, None] * lam + seen.mT @ c.C_bhqn


def _log_decay_vjp(c: _Chunk, pairs: Tensor, seen: Tensor, carried: Tensor, h: Tensor, lam: Tensor) -> Tensor:
    """Cotangent of each step's log decay δ A, (b, h, q), float64.

    A product over steps j < t <= q counts for every t between, so it is added at q, taken off at j, and summed from the end. In
    float64 the parts that lie on one side of t cancel to nothing.
    """
    ends = pairs.sum(-1, dtype=torch.float64) - pairs.sum(-2, dtype=torch.float64) + seen.double() - carried.double()
    ends[..., -1] += carried.sum(-1, dtype=torch.float64) + c.whole_bh.double() * (lam * h).sum((-2, -1), dtype=torch.float64)
    return ends.flip(-1).cumsum(-1).flip(-1)
