"""The paper's sums as they are written, in O(T²): slow, short, differentiable, and shared by no code with what they test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[int, Tensor], Tensor]  # from i and h[i-1] to h[i]


def rebuilt_states(step: Step, start: Tensor, steps: int, window: int) -> Tensor:
    """h[t] for every t, whose gradient reaches steps t - window + 1 … t only: rebuilt from the detached h[t - window].

    The first state is constant only where the window ends before it. Result: (B, T, …).
    """
    known, h = [], start
    for t in range(steps):
        h = step(t, h).detach()
        known.append(h)
    out = []
    for t in range(steps):
        first = max(0, t + 1 - window)
        h = known[first - 1] if first else start
        for i in range(first, t + 1):
            h = step(i, h)
        out.append(h)
    return torch.stack(out, 1)


def linear_scan(window: int, a: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if b.is_complex() and not a.is_complex():
        a = a.to(b.dtype)
    start = torch.zeros_like(b[:, 0]) if h0 is None else h0
    h = rebuilt_states(lambda t, h: a[:, t] * h + b[:, t], start, b.shape[1], window)
    return h, h[:, -1]


def dense_scan(window: int, A: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    start = torch.zeros_like(b[:, 0]) if h0 is None else h0
    h = rebuilt_states(lambda t, h: (A[:, t] @ h[..., None])[..., 0] + b[:, t], start, b.shape[1], window)
    return h, h[:, -1]


def _delta(dt: Tensor, bias: Tensor | None, softplus: bool, limit: Any = None) -> Tensor:
    dt = dt if bias is None else dt + bias
    dt = torch.nn.functional.softplus(dt) if softplus else dt
    return dt if limit is None else dt.clamp(*limit)


def _gated(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D * x
    return y if z is None else y * torch.nn.functional.silu(z)


def selective_scan(
    window: int,
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
    delta = _delta(dt, dt_bias, dt_softplus)
    h, last = linear_scan(window, torch.exp(delta[..., None] * A), (delta * x)[..., None] * B[:, :, None], h0)
    return _gated((h * C[:, :, None]).sum(-1), x, D, z), last


def ssd(
    window: int,
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
    dt_limit: Any = None,
) -> tuple[Tensor, Tensor]:
    delta = _delta(dt, dt_bias, dt_softplus, dt_limit)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    decay = torch.exp(delta * A)[..., None, None].expand(*x.shape, B.shape[3])
    h, last = linear_scan(window, decay, (delta[..., None] * x)[..., None] * B[:, :, :, None], h0)
    return _gated((h * C[:, :, :, None]).sum(-1), x, None if D is None else D[:, None], z), last


def gated_delta_rule(
    window: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(g if g.dim() == 4 else g[..., None])
    start = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if h0 is None else h0

    def step(t: int, state: Tensor) -> Tensor:
        state = decay[:, t, :, :, None] * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        return state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)

    states = rebuilt_states(step, start, v.shape[1], window)
    return torch.einsum("bthk,bthkv->bthv", q, states), states[:, -1]


OPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linear_scan": linear_scan,
    "dense_scan": dense_scan,
    "selective_scan": selective_scan,
    "ssd": ssd,
    "gated_delta_rule": gated_delta_rule,
}
