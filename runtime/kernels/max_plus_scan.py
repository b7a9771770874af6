"""The (max, +) recurrence for every device, by doubling: log2(T) elementwise passes over what is one number a head and step."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import call, state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask


def max_plus_scan(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.max_plus_scan`; also returns which side each step comes from."""
    wide = state_dtype(a, b, h0)
    added, best = a.to(wide, copy=True, memory_format=torch.contiguous_format), b.to(wide, copy=True)
    first = torch.zeros_like(best[:, 0]) if h0 is None else h0.to(wide)
    best[:, 0] = torch.maximum(best[:, 0], added[:, 0] + first)
    reach = 1
    while reach < b.shape[1]:  # best[t] is over the last `reach` steps, added[t] their sum
        best[:, reach:] = torch.maximum(best[:, reach:], added[:, reach:] + best[:, :-reach])
        added[:, reach:] = added[:, reach:] + added[:, :-reach]
        reach *= 2
    carried = a.to(wide) + torch.cat([first[:, None], best[:, :-1]], 1)
    picks = (carried > b).to(torch.int8) * 2 + (carried == b).to(torch.int8)
    h = torch.empty(b.shape, dtype=torch.promote_types(a.dtype, b.dtype), device=b.device).copy_(best)
    return h, best[:, -1].clone(memory_format=torch.contiguous_format), picks.contiguous()


def max_plus_scan_vjp(dh: Tensor | None, dh_last: Tensor | None, picks: Tensor, mask: Mask) -> tuple[Tensor | None, ...]:
    """The cotangent of h[t] goes on to h[t-1] as far as h[t] comes from there: a linear recurrence in reversed time."""
    wide = state_dtype(dh, dh_last)
    share = picks.to(wide) / 2
    inputs = torch.zeros_like(share) if dh is None else dh.to(wide).clone(memory_format=torch.contiguous_format)
    if dh_last is not None:
        inputs[:, -1] += dh_last
    decays = torch.cat([share[:, 1:], torch.zeros_like(share[:, :1])], 1)
    reached = call("linear_scan", decays.flip(1), inputs.flip(1), None)[0].flip(1)
    da = share * reached
    found = (da, reached - da, da[:, 0].clone(memory_format=torch.contiguous_format))
    return tuple(grad if keep else None for grad, keep in zip(found, mask, strict=True))
