"""Torch form of the root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.rms_norm`; also 1 / rms of each row."""
    wide = x.to(state_dtype(x))
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    y = (wide * scale[..., None]).to(x.dtype)
    return (y if weight is None else y * weight).contiguous(), scale


def rms_norm_vjp(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, scale: Tensor, mask: Mask
) -> tuple[Tensor | None, Tensor | None]:
    """Cotangents of x, with `dresidual` added, and of weight."""
    wide = scale.dtype
    normal = x.to(wide) * scale[..., None]
    dx = dweight = None
    if mask[0]:
        dout = dy.to(wide) if weight is None else dy.to(wide) * weight.to(wide)
        dx = (dout - normal * (dout * normal).mean(-1, keepdim=True)) * scale[..., None]
        dx = (dx if dresidual is None else dx + dresidual.to(wide)).to(x.dtype).contiguous()
    if mask[1] and weight is not None:
        dweight = (dy.to(wide) * normal).flatten(0, -2).sum(0).to(weight.dtype)
    return dx, dweight
