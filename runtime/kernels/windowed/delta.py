"""Windowed VJP of the gated delta rule, whose transition (I - β k kᵀ) diag(e^g) is linear in the state.

Legend: B batch, S blocks, H heads (a slice of them), K key and V value channels, L steps of the chunk, M steps of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.windowed.blocks import Blocks, dense, handed_on, slices, steps_after


@dataclass(frozen=True)
class _Steps:
    """Steps of the rule; leading axes are those of the tensors. decay is e^g, (…, H, K) or (…, H, 1)."""

    q: Tensor
    k: Tensor
    v: Tensor  # of the steps after the chunk: nothing, the adjoint doesn't read it
    decay: Tensor
    beta: Tensor  # (…, H, 1)
    dy: Tensor

    def map(self, change: object) -> _Steps:
        """The same change of every tensor."""
        return _Steps(*(change(t) for t in (self.q, self.k, self.v, self.decay, self.beta, self.dy)))  # type: ignore[operator]

    def before(self, state: Tensor) -> Tensor:
        """A · state: (…, H, K, V)."""
        faded = self.decay[..., None] * state
        return faded - (self.beta * self.k)[..., None] * (self.k[..., None, :] @ faded)

    def after(self, adjoint: Tensor) -> Tensor:
        """Aᵀ · adjoint: (…, H, K, V)."""
        turned = adjoint - self.k[..., None] * ((self.beta * self.k)[..., None, :] @ adjoint)
        return self.decay[..., None] * turned

    def behind(self, reach: Tensor) -> Tensor:
        """reach · A: (…, H, K, K)."""
        turned = reach - (reach @ self.k[..., None]) * (self.beta * self.k)[..., None, :]
        return turned * self.decay[..., None, :]

    def cotangent(self) -> Tensor:
        """What y = Sᵀ q hands to S: (…, H, K, V)."""
        return self.q[..., None] * self.dy[..., None, :]


def gated_delta_rule_window_vjp(
    dy: Tensor | None,
    adjoint: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    h0: Tensor,
    mask: Mask,
    window: int,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (q, k, v, g, beta), and what the chunk before needs. h0: (B, H, K, V)."""
    wide = state_dtype(q, k, v, g, beta, h0)
    batch, steps, heads, keys = k.shape
    values = v.shape[3]
    inputs = [t.to(wide) for t in (q, k, v, g, beta)]
    cotangent = torch.zeros_like(inputs[2]) if dy is None else dy.to(wide)
    sizes = [t[0, 0].numel() for t in (q, k, v, g, beta)]
    after = steps_after(adjoint, heads * keys * values, sum(sizes), window)
    later = [t.unflatten(2, like.shape[2:]) for t, like in zip(after.split(sizes, 2), inputs, strict=True)]
    start = h0.to(wide)
    grads: list[list[Tensor]] = []
    for part in slices(heads, batch * (steps + window) * keys * values):
        own = [t[:, :, part] for t in inputs]
        own_steps = _steps(own, cotangent[:, :, part])
        rest = [t[:, :, part] for t in later]
        lam = _adjoint(own_steps, _steps(rest, rest[2]), window)
        grads.append(_local(own_steps, lam, start[:, part]))
    dq, dk, dv, dg, dbeta = (torch.cat([found[i] for found in grads], 2) for i in range(5))
    dg = dg if g.dim() == 4 else dg.sum(3)
    dh0 = torch.cat([found[5] for found in grads], 1).flatten(1)
    tokens = torch.cat([t.flatten(2) for t in (inputs[0], inputs[1], cotangent, inputs[3], inputs[4])], 2)
    back = handed_on(dh0, tokens, after)
    return (*dense([dq, dk, dv, dg, dbeta[..., 0]], [q, k, v, g, beta], mask), back)


def _steps(tensors: Sequence[Tensor], dy: Tensor) -> _Steps:
    q, k, v, g, beta = tensors
    return _Steps(q, k, v, torch.exp(g if g.dim() == 4 else g[..., None]), beta[..., None], dy)


def _adjoint(own: _Steps, later: _Steps, window: int) -> Tensor:
    """λ (B, L, H, K, V); all blocks of a chunk step by step at once."""
    steps = own.q.shape[1]
    blocks = Blocks(steps, window)
    whole = _Steps(*(torch.cat([a, b], 1) for a, b in zip(_tensors(own), _tensors(later), strict=True)))
    mine, following = whole.map(blocks.own), whole.map(blocks.following)
    sums = _following_sums(following, window - 1, blocks.length)
    identity = torch.eye(own.k.shape[-1], dtype=own.k.dtype, device=own.k.device)
    reach = identity.expand(*mine.k[:, :, 0].shape, identity.shape[0])
    found: list[Tensor] = []
    inside: Tensor | None = None
    for r in range(blocks.length - 1, -1, -1):
        step = mine.map(lambda t, r=r: t[:, :, r])
        if inside is None:
            inside = step.cotangent()
        else:
            later_step = mine.map(lambda t, r=r: t[:, :, r + 1])
            inside = step.cotangent() + later_step.after(inside)
            reach = later_step.behind(reach)
        beyond = r + window - 1 - blocks.length
        found.append(inside if beyond < 0 else inside + reach.mT @ sums[beyond])
    return blocks.joined(torch.stack(found[::-1], 2))


def _tensors(steps: _Steps) -> tuple[Tensor, ...]:
    return (steps.q, steps.k, steps.v, steps.decay, steps.beta, steps.dy)


def _following_sums(following: _Steps, count: int, block: int) -> dict[int, Tensor]:
    """R[t] for the steps t after the blocks that some window ends at."""
    sums: dict[int, Tensor] = {}
    reach = total = None
    for t in range(count):
        step = following.map(lambda tensor, t=t: tensor[:, :, t])
        if reach is None:
            identity = torch.eye(step.k.shape[-1], dtype=step.k.dtype, device=step.k.device)
            reach = identity.expand(*step.k.shape, identity.shape[0])
        reach = step.before(reach)
        term = (reach.mT @ step.q[..., None]) * step.dy[..., None, :]
        total = term if total is None else total + term
        if t >= count - block:
            sums[t] = total
    return sums


def _local(own: _Steps, lam: Tensor, h0: Tensor) -> list[Tensor]:
    """Cotangents of q, k, v, g per key channel (summed where it is one number), β (…, 1) and of the state before the chunk."""
    before = []
    state = h0
    for t in range(own.q.shape[1]):
        before.append(state)
        step = own.map(lambda tensor, t=t: tensor[:, t])
        state = step.before(state) + (step.beta * step.k)[..., None] * step.v[..., None, :]
    previous = torch.stack(before, 1)
    faded = own.decay[..., None] * previous
    error = own.v - (own.k[..., None, :] @ faded)[..., 0, :]
    along = (own.k[..., None, :] @ lam)[..., 0, :]  # λᵀ k
    dv = own.beta * along
    dbeta = (along * error).sum(-1, keepdim=True)
    dk = own.beta * (lam @ error[..., None])[..., 0] - (faded @ dv[..., None])[..., 0]
    dfaded = lam - own.k[..., None] * dv[..., None, :]
    dg = (dfaded * faded).sum(-1)
    after = torch.cat([previous[:, 1:], state[:, None]], 1)
    dq = (after @ own.dy[..., None])[..., 0]
    return [dq, dk, dv, dg, dbeta, own.decay[:, 0, ..., None] * dfaded[:, 0]]
