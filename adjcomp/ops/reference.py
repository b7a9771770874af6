"""Plain sequential references of every op: short loops over time, differentiable by autograd, in any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_scan`."""
    h = torch.zeros_like(b[:, 0]) if h0 is None else h0
    out = []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        out.append(h)
    return torch.stack(out, 1), h


def logcumsumexp(x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.logcumsumexp`."""
    last = torch.full_like(x[:, 0], -torch.inf) if state is None else state[..., 0] + state[..., 1].log()
    out = []
    for t in range(x.shape[1]):
        last = torch.logaddexp(last, x[:, t])
        out.append(last)
    return torch.stack(out, 1), torch.stack((last, torch.ones_like(last)), -1)


def dense_scan(A: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.dense_scan`."""
    h = torch.zeros_like(b[:, 0]) if h0 is None else h0
    out = []
    for t in range(b.shape[1]):
        h = (A[:, t] @ h[..., None])[..., 0] + b[:, t]
        out.append(h)
    return torch.stack(out, 1), h


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    delta = dt if bias is None else dt + bias
    return torch.nn.functional.softplus(delta) if softplus else delta


def selective_scan(
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
    """See `adjcomp.ops.selective_scan`."""
    delta = _step_size(dt, dt_bias, dt_softplus)
    h, last = linear_scan(torch.exp(delta[..., None] * A), (delta * x)[..., None] * B[:, :, None], h0)
    y = (h * C[:, :, None]).sum(-1)
    y = y if D is None else y + D * x
    return y if z is None else y * torch.nn.functional.silu(z), last


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
    """See `adjcomp.ops.ssd`."""
    delta = _step_size(dt, dt_bias, dt_softplus)
    delta = delta if dt_limit is None else delta.clamp(dt_limit[0], dt_limit[1])
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    decay = torch.exp(delta * A)[..., None, None].expand(*x.shape, B.shape[3])
    h, last = linear_scan(decay, (delta[..., None] * x)[..., None] * B[:, :, :, None], h0)
    y = (h * C[:, :, :, None]).sum(-1)
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * torch.nn.functional.silu(z), last


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.gated_delta_rule`."""
    batch, steps, heads, values = v.shape
    state = v.new_zeros(batch, heads, k.shape[3], values) if h0 is None else h0
    decay = torch.exp(g if g.dim() == 4 else g[..., None])
    out = []
    for t in range(steps):
        state = decay[:, t, :, :, None] * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1), state


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_attention`."""
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if h0 is None else h0
    out = []
    for t in range(v.shape[1]):
        state = torch.exp(g[:, t, :, None, None]) * state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(out, 1), state


def max_plus_scan(a: Tensor, b: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.max_plus_scan`."""
    h = torch.zeros_like(b[:, 0]) if h0 is None else h0
    out = []
    for t in range(b.shape[1]):
        h = torch.maximum(a[:, t] + h, b[:, t])
        out.append(h)
    return torch.stack(out, 1), h


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tail: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.causal_conv1d`."""
    steps, width = x.shape[1], weight.shape[1]
    full = torch.cat([x.new_zeros(x.shape[0], width - 1, x.shape[2]) if tail is None else tail, x], 1)
    y = torch.stack([full[:, tap : tap + steps] * weight[:, tap] for tap in range(width)]).sum(0)
    y = y if bias is None else y + bias
    return torch.nn.functional.silu(y) if activation == "silu" else y, full[:, steps:]


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """See `adjcomp.ops.causal_attention`; holds all scores."""
    keys = k if past_k is None else torch.cat([past_k, k], 1)
    values = v if past_v is None else torch.cat([past_v, v], 1)
    keys, values = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (keys, values))
    scores = torch.einsum("bthd,bshd->bhts", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    s = torch.arange(keys.shape[1], device=q.device)
    t = s[keys.shape[1] - q.shape[1] :, None]
    hidden = s > t if window is None else (s > t) | (s <= t - window)
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_cross_entropy`; holds all logits."""
    logits = (x @ weight.T).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten().long(), ignore_index=ignore_index, reduction="sum")
    return loss, (labels != ignore_index).sum()


def counter_uniform(seed: int, node: int, outer: int, time: int, inner: int) -> float:
    """One number of `adjcomp.ops.counter_uniform`, by its place."""
    key = _mix(_mix(seed + _GOLDEN) + node * _GOLDEN)
    key = _mix(_mix(key + outer * _GOLDEN) + time * _GOLDEN)
    return (_mix(key + (inner + 1) * _GOLDEN) >> 40) * 2.0**-24


_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value &= (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return value ^ (value >> 31)
