"""`adjcomp::logcumsumexp` on every device: torch's own running log-sum-exp, and a VJP that is a linear recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import call, state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask


def logcumsumexp(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.logcumsumexp`; y comes as wide as the state."""
    y = torch.logcumsumexp(x.to(state_dtype(x, state)), 1)
    if state is not None:
        before = state[..., 0] + state[..., 1].log()
        y = torch.logaddexp(y, before.to(y.dtype)[:, None])
    last = y[:, -1]
    return y.contiguous(), torch.stack((last, torch.ones_like(last)), -1)


def logcumsumexp_vjp(
    dy: Tensor | None, dstate_last: Tensor | None, x: Tensor, y: Tensor, state: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """r[t] = dy[t] + exp(y[t] - y[t+1]) r[t+1];  dx[t] = exp(x[t] - y[t]) r[t];  with a = exp(m - y[0]) r[0]: dm = n a,  dn = a.

    y never falls, so every factor is at most one.
    """
    r = torch.zeros_like(y) if dy is None else dy.to(y.dtype)
    if dstate_last is not None:
        r = torch.cat((r[:, :-1], r[:, -1:] + dstate_last[:, None, ..., 0].to(y.dtype)), 1)
    decay = torch.cat((torch.zeros_like(y[:, :1]), _shares(y[:, :-1], y[:, 1:]).flip(1)), 1)
    r = call("linear_scan", decay, r.flip(1), None)[0].flip(1)
    dx = (_shares(x.to(y.dtype), y) * r).to(x.dtype) if mask[0] else None
    if not mask[1] or state is None:
        return dx, None
    share = _shares(state[..., 0].to(y.dtype), y[:, 0]) * r[:, 0]
    return dx, torch.stack((state[..., 1] * share, share), -1).to(state.dtype)


def _shares(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole); nothing is a share of nothing."""
    return torch.where(whole == -torch.inf, 0.0, torch.exp(part - whole))
