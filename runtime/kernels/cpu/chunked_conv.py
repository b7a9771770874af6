"""Torch form of the causal convolution: one shifted product per tap."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like, silu_vjp


def _padded(x: Tensor, tail: Tensor | None, width: int, wide: torch.dtype) -> Tensor:
    """The tail (zeros when None) followed by x, (B, W - 1 + T, D)."""
    shape = (x.shape[0], width - 1, x.shape[2])
    before = torch.zeros(shape, dtype=wide, device=x.device) if tail is None else tail.to(wide)
    return torch.cat([before, x.to(wide)], 1)


def _convolve(full: Tensor, weight: Tensor, bias: Tensor | None, steps: int) -> Tensor:
    out = full[:, :steps] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        out.addcmul_(full[:, tap : tap + steps], weight[:, tap])
    return out if bias is None else out.add_(bias)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.causal_conv1d`."""
    wide = state_dtype(x, weight, bias, tail)
    full = _padded(x, tail, weight.shape[1], wide)
    out = _convolve(full, weight.to(wide), None if bias is None else bias.to(wide), x.shape[1])
    out = torch.nn.functional.silu(out) if silu else out
    return out.to(x.dtype).contiguous(), full[:, x.shape[1] :].clone()


def causal_conv1d_vjp(
    dy: Tensor | None,
    dtail_last: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    silu: bool,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Cotangents of x, weight, bias and tail."""
    wide = state_dtype(x, weight, bias, tail)
    steps, width = x.shape[1], weight.shape[1]
    full, taps = _padded(x, tail, width, wide), weight.to(wide)
    dout = torch.zeros(x.shape, dtype=wide, device=x.device) if dy is None else dy.to(wide)
    if silu:
        dout = silu_vjp(dout, _convolve(full, taps, None if bias is None else bias.to(wide), steps))
    dfull = torch.zeros_like(full)
    if dtail_last is not None:
        dfull[:, steps:] += dtail_last.to(wide)
    for tap in range(width):
        dfull[:, tap : tap + steps].addcmul_(dout, taps[:, tap])
    dweight = torch.stack([(dout * full[:, tap : tap + steps]).sum((0, 1)) for tap in range(width)], 1)
    grads: list[Tensor | None] = [dfull[:, width - 1 :].contiguous(), dweight, dout.sum((0, 1)), dfull[:, : width - 1].clone()]
    return tuple(cast_like(grads, [x, weight, bias, tail], mask))
