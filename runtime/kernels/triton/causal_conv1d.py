"""`adjcomp::causal_conv1d` on a GPU and its VJP."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import chunked_conv
from adjcomp.runtime.kernels.triton import causal_conv1d_kernels as kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose, segments
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter, strides, timed

INTERVAL = 64  # fewest steps of a segment


def _cut(config: Config, x: Tensor, rows: int, width: int) -> tuple[dict[str, int], tuple[int, int]]:
    """How `rows` of time are cut into segments, and the grid."""
    blocks = -(-x.shape[2] // config.constants["BLOCK_D"])
    segment = segments(rows, max(1, x.shape[0] * blocks), INTERVAL, x.device)
    segment = max(segment, INTERVAL * -(-width // INTERVAL))
    count = -(-rows // segment)
    return {"segment": segment, "count": count}, (x.shape[0] * count, blocks)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.causal_conv1d`."""
    if is_wide(x, weight, bias, tail):
        return chunked_conv.causal_conv1d(x, weight, bias, tail, silu)
    batch, steps, channels = x.shape
    width = weight.shape[1]
    config = choose("causal_conv1d", x.device, width=width)
    cut, grid = _cut(config, x, steps, width)
    y = x.new_empty(x.shape)
    last = x.new_empty((batch, width - 1, channels), dtype=torch.float32)
    x = timed(x)
    arguments = {"x": x, "weight": parameter(weight.T), "bias": parameter(bias), "tail": parameter(tail), "y": y, "last": last}
    sizes = {**strides("x", x), "T": steps, "D": channels, "WIDTH": width, "SILU": silu, **cut}
    launch(kernels.causal_conv1d, grid, {**arguments, **sizes}, config)
    return y, last


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
    """See `adjcomp.ops.causal_conv1d`: cotangents of x, weight, bias and tail."""
    if is_wide(x, weight, bias, tail):
        return chunked_conv.causal_conv1d_vjp(dy, dtail_last, x, weight, bias, tail, silu, mask)
    batch, steps, channels = x.shape
    width, wide = weight.shape[1], state_dtype(x)
    config = choose("causal_conv1d_vjp", x.device, width=width)
    cut, grid = _cut(config, x, steps + width - 1, width)
    dy = torch.zeros_like(x) if dy is None else dy
    dx = x.new_empty(x.shape) if mask[0] else None
    dweight = x.new_empty((batch, cut["count"], width, channels), dtype=wide) if mask[1] else None
    dbias = x.new_empty((batch, cut["count"], channels), dtype=wide) if mask[2] and bias is not None else None
    dtail = x.new_empty((batch, width - 1, channels), dtype=wide) if mask[3] and tail is not None else None
    x, dy = timed(x), timed(dy)
    arguments = {
        "dy": dy,
        "dlast": parameter(dtail_last),
        "x": x,
        "weight": parameter(weight.T),
        "bias": parameter(bias),
        "tail": parameter(tail),
        "dx": dx,
        "dtail": dtail,
        "dweight": dweight,
        "dbias": dbias,
        **strides("dy", dy),
        **strides("x", x),
    }
    sizes = {"T": steps, "D": channels, "WIDTH": width, "SILU": silu, **cut}
    launch(kernels.causal_conv1d_vjp, grid, {**arguments, **sizes}, config)
    return (
        dx,
        None if dweight is None else dweight.sum((0, 1)).T.to(weight.dtype).contiguous(),
        None if dbias is None or bias is None else dbias.sum((0, 1)).to(bias.dtype),
        None if dtail is None or tail is None else dtail.to(tail.dtype),
    )
