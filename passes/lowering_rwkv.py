"""RWKV's attention without queries in terms of `adjcomp.ops`: transformers' own form is a loop over time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from adjcomp import ops
from adjcomp.errors import CaptureError

EARLIEST = -1e38  # the running maximum before the first step, as transformers has it


def rwkv_linear_attention(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: object = None, return_state: bool = False
) -> tuple[Tensor, list[Tensor] | None]:
    """Weighted means of values, the current one with a bonus u = `time_first`; decays w = -exp(`time_decay`) are per channel.

    With S[t] = e^w S[t-1] + e^{k[t]} v[t], and N the same for ones in place of v, the result is
    (S[t-1] + e^{u + k[t]} v[t]) / (N[t-1] + e^{u + k[t]}). S and N are held times e^{-m}, where m[t] = max(m[t-1] + w, k[t]):
    then no factor is above one, and N is 1 at least after a step. The result doesn't depend on m, so m takes no gradient; states
    that are returned do.

    Args:
        time_decay, time_first: (D,). key, value: (B, T, D). state: None.

    Raises:
        CaptureError: the call goes on from a state.
    """
    if state is not None:
        raise CaptureError("RWKV goes on from a state of its own: compile the call without `state`, or use adjcomp's State")
    k, v, w = key.float(), value.float(), -torch.exp(time_decay).float()
    decay = w.expand_as(k)
    m, m_last = ops.max_plus_scan(decay, k, torch.full_like(k[:, 0], EARLIEST))
    held = m if return_state else m.detach()
    bonus = k + time_first.float()
    before = _before(held, torch.ones_like(k[..., :1]))
    enters, stays = torch.exp(k - held), torch.exp((before - held) + decay)
    num, num_last = ops.linear_scan(stays, enters * v)
    den, den_last = ops.linear_scan(stays, enters)
    top = torch.maximum(before, bonus)
    earlier, current = torch.exp(before - top), torch.exp(bonus - top)
    mean = (earlier * _shifted(num) + current * v) / (earlier * _shifted(den) + current)
    return mean.to(key.dtype), [num_last, den_last, m_last] if return_state else None


def _shifted(x: Tensor) -> Tensor:
    """x one step later, zeros first."""
    return functional.pad(x, (0, 0, 1, -1))


def _before(m: Tensor, ones: Tensor) -> Tensor:
    """m one step later, EARLIEST first."""
    return torch.where(_shifted(ones) > 0, _shifted(m), EARLIEST)
