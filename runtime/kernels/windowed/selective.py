"""Windowed VJPs of `selective_scan` and `ssd`: both are diagonal recurrences per channel with N states each.

The SSD form is the same with channels (head, width), one δ and one decay a head, and B and C per group of heads. Channels are
worked on in slices, so that nothing of size L × channels × N is ever whole.

Legend: B batch, L steps of the chunk, E steps of the chunk and W - 1 after it, C channels, N states, G groups, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, silu_vjp, step_size, step_size_vjp, widen
from adjcomp.runtime.kernels.windowed.blocks import dense, diagonal_adjoint, handed_on, slices, steps_after, with_later


@dataclass(frozen=True)
class _Channels:
    """A slice of channels in the wide dtype; `steps` is L."""

    x: Tensor  # (B, L, C)
    delta: Tensor  # (B, E, C)
    cotangent: Tensor  # (B, E, C), of C · h
    A: Tensor  # (C, N), or (C, 1) where a channel has one decay
    B: Tensor  # (B, L, N)
    C: Tensor  # (B, E, N)
    h0: Tensor  # (B, C, N)
    steps: int


@dataclass(frozen=True)
class _Shares:
    """What a slice of channels gives."""

    read: Tensor  # C · h, (B, L, C)
    dx: Tensor  # through the recurrence alone
    ddelta: Tensor  # (B, L, C)
    dA: Tensor  # like A
    dB: Tensor  # (B, L, N)
    dC: Tensor  # (B, L, N)
    dh0: Tensor  # (B, C, N)


def _shares(c: _Channels, window: int) -> _Shares:
    """The VJP of h[t] = exp(δ A) h[t-1] + δ x B and C · h, with the windowed adjoint in the place of the adjoint."""
    steps, shape = c.steps, (*c.delta.shape, c.B.shape[2])
    decay = torch.exp(c.delta[..., None] * c.A).expand(shape)
    scaled = c.delta[:, :steps] * c.x
    inputs = scaled[..., None] * c.B[:, :, None]
    h = torch.ops.adjcomp.linear_scan.default(decay[:, :steps].contiguous(), inputs, c.h0.contiguous())[0]
    outer = c.cotangent[..., None] * c.C[:, :, None]
    lam = diagonal_adjoint(decay.flatten(2), outer.flatten(2), steps, window).unflatten(2, shape[2:])
    before = torch.cat([c.h0[:, None], h[:, :-1]], 1)
    dlog = lam * before * decay[:, :steps]
    through_B = (lam * c.B[:, :, None]).sum(-1)
    dA = dlog * c.delta[:, :steps, :, None]
    return _Shares(
        read=(h * c.C[:, :steps, None]).sum(-1),
        dx=c.delta[:, :steps] * through_B,
        ddelta=(dlog * c.A).sum(-1) + c.x * through_B,
        dA=dA.sum((0, 1)).sum_to_size(c.A.shape),
        dB=torch.einsum("blcn,blc->bln", lam, scaled),
        dC=torch.einsum("blcn,blc->bln", h, c.cotangent[:, :steps]),
        dh0=decay[:, 0] * lam[:, 0],
    )


@dataclass(frozen=True)
class _Outside:
    """Input, gate and skip around the recurrence, with channels flat: (B, L, C); D: (C,)."""

    x: Tensor
    z: Tensor | None
    D: Tensor | None
    dy: Tensor

    def cotangent(self) -> Tensor:
        """Of what the gate multiplies."""
        return self.dy if self.z is None else self.dy * torch.nn.functional.silu(self.z)

    def vjp(self, found: _Shares) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cotangents of x, D (for every channel) and z."""
        dout = self.cotangent()
        dx = found.dx if self.D is None else found.dx + self.D * dout
        skipped = found.read if self.D is None else found.read + self.D * self.x
        return dx, (dout * self.x).sum((0, 1)), None if self.z is None else silu_vjp(self.dy, self.z) * skipped


@dataclass(frozen=True)
class _Wide:
    """The arguments in the wide dtype."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None


def _joined(parts: list[_Shares]) -> _Shares:
    """Slices of channels that share B and C, together."""
    side = {name: torch.cat([getattr(p, name) for p in parts], 2) for name in ("read", "dx", "ddelta")}
    dB, dC = torch.stack([p.dB for p in parts]).sum(0), torch.stack([p.dC for p in parts]).sum(0)
    return _Shares(**side, dA=torch.cat([p.dA for p in parts]), dB=dB, dC=dC, dh0=torch.cat([p.dh0 for p in parts], 1))


def selective_scan_window_vjp(
    dy: Tensor | None,
    adjoint: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor,
    dt_softplus: bool,
    mask: Mask,
    window: int,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (x, dt, A, B, C, D, z, dt_bias), and what the chunk before needs. h0: (B, C, N)."""
    inputs = [x, dt, A, B, C, D, z, dt_bias]
    wide = state_dtype(*inputs, h0)
    w = _Wide(*widen(wide, *inputs))  # type: ignore[arg-type]
    batch, steps, channels = x.shape
    states = A.shape[1]
    outside = _Outside(w.x, w.z, w.D, torch.zeros_like(w.x) if dy is None else dy.to(wide))
    own = (step_size(w.dt, w.dt_bias, dt_softplus), outside.cotangent(), w.C)
    after = steps_after(adjoint, channels * states, 2 * channels + states, window)
    delta, cotangent, reader = with_later(own, after)
    start = h0.to(wide)
    parts = [
        _shares(_Channels(w.x[..., s], delta[..., s], cotangent[..., s], w.A[s], w.B, reader, start[:, s], steps), window)
        for s in slices(channels, batch * (steps + window) * states)
    ]
    found = _joined(parts)
    ddt = step_size_vjp(found.ddelta, w.dt, w.dt_bias, dt_softplus)
    dx, dD, dz = outside.vjp(found)
    grads = [dx, ddt, found.dA, found.dB, found.dC, dD, dz, ddt.sum((0, 1))]
    return (*dense(grads, inputs, mask), handed_on(found.dh0.flatten(1), torch.cat(own, 2), after))


def ssd_window_vjp(
    dy: Tensor | None,
    adjoint: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor,
    dt_softplus: bool,
    dt_limit: list[float] | None,
    mask: Mask,
    window: int,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (x, dt, A, B, C, D, z, dt_bias), and what the chunk before needs. h0: (B, H, P, N)."""
    inputs = [x, dt, A, B, C, D, z, dt_bias]
    wide = state_dtype(*inputs, h0)
    w = _Wide(*widen(wide, *inputs))  # type: ignore[arg-type]
    heads, width = x.shape[2:]
    groups, states = B.shape[2:]
    outside = _Outside(
        w.x.flatten(2),
        None if w.z is None else w.z.flatten(2),
        None if w.D is None else w.D.repeat_interleave(width),
        (torch.zeros_like(w.x) if dy is None else dy.to(wide)).flatten(2),
    )
    own = (step_size(w.dt, w.dt_bias, dt_softplus, dt_limit), outside.cotangent(), w.C.flatten(2))
    after = steps_after(adjoint, heads * width * states, heads + heads * width + groups * states, window)
    later = with_later(own, after)
    found = [_group_shares(w, outside.x, later, h0.to(wide), g, window) for g in range(groups)]
    side = {name: torch.cat([getattr(p, name) for p in found], 2) for name in ("read", "dx", "ddelta")}
    dA, dh0 = torch.cat([p.dA for p in found]), torch.cat([p.dh0 for p in found], 1)
    dB, dC = torch.stack([p.dB for p in found], 2), torch.stack([p.dC for p in found], 2)
    ddt = step_size_vjp(side["ddelta"].unflatten(2, (heads, width)).sum(3), w.dt, w.dt_bias, dt_softplus, dt_limit)
    dx, dD, dz = outside.vjp(_Shares(**side, dA=dA, dB=dB, dC=dC, dh0=dh0))
    shaped = [dx.view(x.shape), ddt, dA.view(heads, width).sum(1), dB, dC, dD.view(heads, width).sum(1)]
    grads = [*shaped, None if dz is None else dz.view(x.shape), ddt.sum((0, 1))]
    return (*dense(grads, inputs, mask), handed_on(dh0.flatten(1), torch.cat(own, 2), after))


def _group_shares(w: _Wide, x: Tensor, later: list[Tensor], h0: Tensor, group: int, window: int) -> _Shares:
    """The channels of the heads that share B and C; x: (B, L, H P). later: δ, cotangents and C of E steps."""
    batch, steps, heads, width = w.x.shape
    groups, states = w.B.shape[2:]
    delta, cotangent, reader = later[0], later[1], later[2].unflatten(2, (groups, states))[:, :, group]
    start, each, parts = h0.reshape(batch, heads * width, states), heads * width // groups, []
    for inside in slices(each, batch * (steps + window) * states):
        s = slice(group * each + inside.start, group * each + inside.stop)
        head = torch.arange(s.start, s.stop, device=x.device) // width
        channels = _Channels(
            x[..., s], delta[..., head], cotangent[..., s], w.A[head, None], w.B[:, :, group], reader, start[:, s], steps
        )
        parts.append(_shares(channels, window))
    return _joined(parts)
