"""Chunked torch form of linear attention with a decay per head, for every device: matrix products inside a chunk of steps, one
state between chunks.

With γ the log decay summed from the chunk's start and S₀ the state before it:
    yᵢ = (e^{γᵢ} qᵢ)ᵀ S₀ + Σ_{j≤i} (qᵢ·kⱼ e^{γᵢ-γⱼ}) vⱼ,    S = e^{γ_L} S₀ + Σⱼ (e^{γ_L-γⱼ} kⱼ) vⱼᵀ.
γ is summed in float64. What has no decay (a step with itself, the last step with the chunk's end) stays out of γ's cotangent,
where it would cancel and leave its rounding.

Legend: b batch, h heads, k key channels, v value channels; i and j steps of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.ops.linear_attention import CHECKPOINT_STEPS
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like


@dataclass(frozen=True)
class _Chunk:
    """One chunk in the wide dtype, heads in front of steps."""

    q_bhik: Tensor
    k_bhik: Tensor
    v_bhiv: Tensor
    since_bhi: Tensor  # e^γ
    until_bhi: Tensor  # e^{γ_L-γ}
    whole_bh: Tensor  # e^{γ_L}
    decay_bhij: Tensor  # e^{γᵢ-γⱼ}, 0 for j > i

    @property
    def seen(self) -> Tensor:
        """Queries as the state before the chunk meets them."""
        return self.since_bhi[..., None] * self.q_bhik

    @property
    def left(self) -> Tensor:
        """Keys as the state after the chunk has them."""
        return self.until_bhi[..., None] * self.k_bhik

    def advance(self, state: Tensor) -> Tensor:
        """The state after the chunk."""
        return self.whole_bh[..., None, None] * state + self.left.mT @ self.v_bhiv


def _chunk(steps: slice, q: Tensor, k: Tensor, v: Tensor, g: Tensor, wide: torch.dtype) -> _Chunk:
    q_, k_, v_ = (t[:, steps].to(wide).transpose(1, 2) for t in (q, k, v))
    log = g[:, steps].transpose(1, 2).double().cumsum(-1)
    size = log.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = (log[..., :, None] - log[..., None, :]).masked_fill_(~below, -torch.inf).to(wide).exp_()
    return _Chunk(q_, k_, v_, log.to(wide).exp(), (log[..., -1:] - log).to(wide).exp(), log[..., -1].to(wide).exp(), decay)


def _spans(length: int) -> list[slice]:
    return [slice(at, min(length, at + CHECKPOINT_STEPS)) for at in range(0, length, CHECKPOINT_STEPS)]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.linear_attention`; also returns the states before each chunk and after the last, (b, chunk, h, k, v)."""
    wide = state_dtype(q, k, v, g, h0)
    batch, length, heads, values = v.shape
    state = v.new_zeros((batch, heads, k.shape[3], values), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    kept = [state]
    for steps in _spans(length):
        c = _chunk(steps, q, k, v, g, wide)
        y[:, steps] = (c.seen @ state + ((c.q_bhik @ c.k_bhik.mT) * c.decay_bhij) @ c.v_bhiv).transpose(1, 2)
        state = c.advance(state)
        kept.append(state)
    return y, state.clone(memory_format=torch.contiguous_format), torch.stack(kept, 1)


def linear_attention_vjp(
    dy: Tensor | None, dh_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, mask: Mask
) -> tuple[Tensor | None, ...]:
    """Walks the chunks backwards; each is rebuilt from the state before it."""
    wide = states.dtype
    inputs = [q, k, v, g]
    sums = [torch.empty(t.shape, dtype=wide, device=v.device) for t in inputs]
    lam = torch.zeros_like(states[:, 0]) if dh_last is None else dh_last.to(wide)
    for index, steps in reversed([*enumerate(_spans(v.shape[1]))]):
        c = _chunk(steps, q, k, v, g, wide)
        dout = torch.zeros_like(c.v_bhiv) if dy is None else dy[:, steps].to(wide).transpose(1, 2)
        grads, lam = _chunk_vjp(c, states[:, index], lam, dout)
        for total, grad in zip(sums, grads, strict=True):
            total[:, steps] = grad.transpose(1, 2)
    return (*cast_like([*sums], [*inputs], mask[:4]), lam if mask[4] else None)


def _chunk_vjp(c: _Chunk, state: Tensor, lam: Tensor, dy: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Cotangents of (q, k, v, g) of a chunk, heads before steps, and the adjoint state before it."""
    products = c.q_bhik @ c.k_bhik.mT
    dscores = dy @ c.v_bhiv.mT
    own = dscores.diagonal(0, -2, -1)[..., None]
    decayed = dscores.tril(-1) * c.decay_bhij
    dq_state = c.since_bhi[..., None] * (dy @ state.mT)
    dk_state = c.until_bhi[..., None] * (c.v_bhiv @ lam.mT)
    dq = decayed @ c.k_bhik + own * c.k_bhik + dq_state
    dk = decayed.mT @ c.q_bhik + own * c.q_bhik + dk_state
    dv = (products * c.decay_bhij).mT @ dy + c.left @ lam
    weights = (decayed * products).double()
    carried = (c.k_bhik * dk_state).sum(-1).double()
    carried[..., -1] = 0
    dlog = weights.sum(-1) - weights.sum(-2) + (c.q_bhik * dq_state).sum(-1) - carried
    dlog[..., -1] += carried.sum(-1) + c.whole_bh * (lam * state).sum((-2, -1))
    dg = dlog.flip(-1).cumsum(-1).flip(-1).to(dq.dtype)
    return (dq, dk, dv, dg), c.whole_bh[..., None, None] * lam + c.seen.mT @ dy
