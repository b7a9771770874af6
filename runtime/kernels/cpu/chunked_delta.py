"""Chunked torch form of the gated delta rule (Yang, Kautz and Hatamizadeh 2024): one triangular system per chunk of steps.

With γ the log decay summed from the chunk's start, S₀ the state before it, and rᵢ what step i writes along kᵢ:
    rᵢ + βᵢ Σ_{j<i} (kᵢ·kⱼ e^{γᵢ-γⱼ}) rⱼ = βᵢ (vᵢ - (e^{γᵢ} kᵢ)ᵀ S₀),    yᵢ = (e^{γᵢ} qᵢ)ᵀ S₀ + Σ_{j≤i} (qᵢ·kⱼ e^{γᵢ-γⱼ}) rⱼ,
    S = e^{γ_L} S₀ + Σⱼ (e^{γ_L-γⱼ} kⱼ) rⱼᵀ.
Only differences γᵢ - γⱼ with j <= i are exponents, so nothing overflows. γ is summed in float64.

Legend: b batch, h heads, k key channels, v value channels; i and j steps of a chunk. γ is (b, h, i, 1) or (b, h, i, k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.delta import CHECKPOINT_STEPS
from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like

WIDE_STEPS = 16  # chunk where every key channel has its own decay: products over (i, j, k) are formed


@dataclass(frozen=True)
class _Pairs:
    """Products a[i] · b[j] e^{γᵢ-γⱼ} for j <= i: by matrix products where the decay is one number per step, else term by term."""

    decay: Tensor  # e^{γᵢ-γⱼ}, zero for j > i: (b, h, i, j) or (b, h, i, j, k)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(b, h, i, j) from (b, h, i, k) and (b, h, j, k)."""
        if self.decay.dim() == 4:
            return (a @ b.mT) * self.decay
        return torch.einsum("bhik,bhjk,bhijk->bhij", a, b, self.decay)

    def vjp(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of a and b from that of the products (those above the diagonal count for nothing)."""
        if self.decay.dim() == 4:
            weighted = grad * self.decay
            return weighted @ b, weighted.mT @ a
        weighted = grad[..., None] * self.decay
        return torch.einsum("bhijk,bhjk->bhik", weighted, b), torch.einsum("bhijk,bhik->bhjk", weighted, a)


@dataclass(frozen=True)
class _Chunk:
    """One chunk with all that its VJP needs, in the wide dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # (b, h, i, 1)
    since: Tensor  # e^γ
    until: Tensor  # e^{γ_L-γ}
    whole: Tensor  # e^{γ_L}, (b, h, 1, 1) or (b, h, k, 1)
    pairs: _Pairs
    scores: Tensor  # q · k with decay, (b, h, i, j)
    overlaps: Tensor  # k · k with decay below the diagonal, (b, h, i, j)
    error: Tensor  # v - (e^γ k)ᵀ S₀
    written: Tensor  # r, (b, h, i, v)


def _system(overlaps: Tensor, beta: Tensor) -> Tensor:
    """I + β overlaps, unit lower triangular."""
    return beta * overlaps + torch.eye(overlaps.shape[-1], dtype=overlaps.dtype, device=overlaps.device)


def _chunk(steps: slice, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> _Chunk:
    wide = state.dtype
    q_, k_, v_ = (t[:, steps].to(wide).transpose(1, 2) for t in (q, k, v))
    gates, strength = g[:, steps].transpose(1, 2), beta[:, steps].to(wide).transpose(1, 2)[..., None]
    log = (gates[..., None] if gates.dim() == 3 else gates).double().cumsum(2)
    size = log.shape[2]
    below = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    gaps = log[:, :, :, None] - log[:, :, None, :]
    decay = gaps.masked_fill(~below[..., None], -torch.inf).to(wide).exp()
    pairs = _Pairs(decay[..., 0] if log.shape[3] == 1 else decay)
    since, until, whole = log.to(wide).exp(), (log[:, :, -1:] - log).to(wide).exp(), log[:, :, -1, :, None].to(wide).exp()
    scores, overlaps = pairs.forward(q_, k_), pairs.forward(k_, k_).tril(-1)
    error = v_ - (since * k_) @ state
    written = torch.linalg.solve_triangular(_system(overlaps, strength), strength * error, upper=False, unitriangular=True)
    return _Chunk(q_, k_, v_, strength, since, until, whole, pairs, scores, overlaps, error, written)


def _advance(c: _Chunk, state: Tensor) -> Tensor:
    return c.whole * state + (c.until * c.k).mT @ c.written


def _length(g: Tensor) -> int:
    return CHECKPOINT_STEPS if g.dim() == 3 else WIDE_STEPS


def _spans(start: int, stop: int, length: int) -> list[slice]:
    return [slice(at, min(stop, at + length)) for at in range(start, stop, length)]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.gated_delta_rule`; also returns the states before each block and after the last, (b, block, h, k, v)."""
    wide = state_dtype(q, k, v, g, beta, h0)
    batch, length, heads, values = v.shape
    state = v.new_zeros((batch, heads, k.shape[3], values), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    kept = []
    for steps in _spans(0, length, _length(g)):
        if steps.start % CHECKPOINT_STEPS == 0:
            kept.append(state)
        c = _chunk(steps, q, k, v, g, beta, state)
        y[:, steps] = ((c.since * c.q) @ state + c.scores @ c.written).transpose(1, 2)
        state = _advance(c, state)
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
    """Walks the blocks backwards; the chunks of each are rebuilt from the state before it."""
    wide = states.dtype
    inputs = [q, k, v, g, beta]
    sums = [torch.empty(t.shape, dtype=wide, device=v.device) for t in inputs]
    lam = torch.zeros_like(states[:, 0]) if dh_last is None else dh_last.to(wide)
    for index in reversed(range(states.shape[1] - 1)):
        start, stop = index * CHECKPOINT_STEPS, min(v.shape[1], (index + 1) * CHECKPOINT_STEPS)
        spans, before = _spans(start, stop, _length(g)), [states[:, index]]
        for steps in spans[:-1]:
            before.append(_advance(_chunk(steps, q, k, v, g, beta, before[-1]), before[-1]))
        for steps, state in zip(reversed(spans), reversed(before), strict=True):
            c = _chunk(steps, q, k, v, g, beta, state)
            dout = torch.zeros_like(c.v) if dy is None else dy[:, steps].to(wide).transpose(1, 2)
            grads, lam = _chunk_vjp(c, state, lam, dout, g.dim() == 3)
            for total, grad in zip(sums, grads, strict=True):
                total[:, steps] = grad.transpose(1, 2)
    return (*cast_like([*sums], [*inputs], mask[:5]), lam if mask[5] else None)


def _chunk_vjp(c: _Chunk, state: Tensor, lam: Tensor, dy: Tensor, single_decay: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """Cotangents of (q, k, v, g, beta) of a chunk, heads before steps, and the adjoint state before it."""
    dwritten = c.scores.mT @ dy + (c.until * c.k) @ lam
    system = _system(c.overlaps, c.beta)
    dright = torch.linalg.solve_triangular(system.mT, dwritten, upper=True, unitriangular=True)
    dsystem = -(dright @ c.written.mT).tril(-1)
    dscores = dy @ c.written.mT
    dq_pair, dk_pair = c.pairs.vjp(dscores.tril(-1), c.q, c.k)
    own = dscores.diagonal(0, -2, -1)[..., None]  # of a step with itself: no decay, so no part of dlog
    first, second = c.pairs.vjp(c.beta * dsystem, c.k, c.k)
    derror = c.beta * dright
    dq_state, dk_state, dk_written = dy @ state.mT, derror @ state.mT, c.written @ lam.mT
    decayed = dq_pair + c.since * dq_state
    dk = dk_pair + own * c.q + first + second - c.since * dk_state + c.until * dk_written
    dbeta = (dright * c.error).sum(-1) + (dsystem * c.overlaps).sum(-1)
    carried = c.k * c.until * dk_written
    carried[:, :, -1] = 0  # the last step's is not decayed either
    dlog = c.q * decayed + c.k * (first - c.since * dk_state - dk_pair - second) - carried
    dlast = carried.sum(2) + c.whole[..., 0] * (lam * state).sum(-1)
    dstate = c.whole * lam + (c.since * c.q).mT @ dy - (c.since * c.k).mT @ derror
    return (decayed + own * c.k, dk, derror, _gate_vjp(dlog, dlast, single_decay), dbeta), dstate


def _gate_vjp(dlog: Tensor, dlast: Tensor, single: bool) -> Tensor:
    """The cotangent of g: that of γ summed from the chunk's end, over key channels too where they share a decay."""
    wide = dlog.double()
    wide[:, :, -1] += dlast
    wide = wide.sum(-1) if single else wide
    return wide.flip(2).cumsum(2).flip(2).to(dlog.dtype)
