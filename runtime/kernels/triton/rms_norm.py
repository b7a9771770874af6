"""`adjcomp::rms_norm` on a GPU, in one pass over memory each way; what surrounds every mixer.

Bytes: x and y once; the VJP reads dy, x and what else flows into x (the residual stream's cotangent, so that adding it costs no
pass of its own), and writes dx. Beside them it leaves one row of dweight per program of at least 16 rows: 1.1 times the minimum.

Legend: r rows (all dimensions but the last), d channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import torch_norm
from adjcomp.runtime.kernels.triton.configs import choose, segments
from adjcomp.runtime.kernels.triton.functions import slot
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter

INTERVAL = 16  # fewest rows of a program in the VJP
LARGEST = 8192  # channels that a program holds in registers; wider rows run in the torch form


@triton.jit
def rms_norm_rows(x, weight, y, scale, x_r, D, eps, BLOCK_D: tl.constexpr):
    """y = x scale weight with scale (r) = 1 / sqrt(mean(x²) + eps); x scale is rounded to y's type first; weight may be None."""
    r = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    value = tl.load(slot(x, r, 0, 1, x_r) + d, mask=d < D, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    out = (value * factor).to(y.dtype.element_ty)
    if weight is not None:
        out = (out.to(tl.float32) * tl.load(weight + d, mask=d < D, other=0.0)).to(y.dtype.element_ty)
    tl.store(slot(y, r, 0, 1, D) + d, out, mask=d < D)
    tl.store(scale + r.to(tl.int64), factor)


@triton.jit
def rms_norm_vjp_rows(
    dy, dresidual, x, weight, scale, dx, dweight, dy_r, dresidual_r, x_r, R, D, rows, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx (r, d), dresidual included, and the sum of dweight over the rows of each program, (program, d).

    Any of dresidual, weight, dx and dweight may be None.
    """
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    dgain = tl.zeros((BLOCK_D,), tl.float32)
    if weight is not None:
        gain = tl.load(weight + d, mask=d < D, other=0.0)
    first = program.to(tl.int64) * rows
    for r in range(first, tl.minimum(first + rows, R)):
        value = tl.load(slot(x, r, 0, 1, x_r) + d, mask=d < D, other=0.0).to(tl.float32)
        dout = tl.load(slot(dy, r, 0, 1, dy_r) + d, mask=d < D, other=0.0).to(tl.float32)
        factor = tl.load(slot(scale, r, 0, 1, 1))
        value *= factor
        dgain += dout * value
        if weight is not None:
            dout *= gain
        grad = factor * (dout - value * (tl.sum(dout * value, 0) / D))
        if dresidual is not None:
            grad += tl.load(slot(dresidual, r, 0, 1, dresidual_r) + d, mask=d < D, other=0.0).to(tl.float32)
        if dx is not None:
            tl.store(slot(dx, r, 0, 1, D) + d, grad.to(dx.dtype.element_ty), mask=d < D)
    if dweight is not None:
        tl.store(slot(dweight, program, 0, 1, D) + d, dgain, mask=d < D)


def _rows(t: Tensor) -> Tensor:
    """(rows, D) with unit stride inside."""
    flat = t.reshape(-1, t.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.rms_norm`; also 1 / rms of each row, (...)."""
    channels = x.shape[-1]
    if is_wide(x, weight) or channels > LARGEST:
        return torch_norm.rms_norm(x, weight, eps)
    config = choose("rms_norm", x.device, channels=channels)
    y, scale, flat = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32), _rows(x)
    arguments = {"x": flat, "weight": parameter(weight), "y": y, "scale": scale}
    sizes = {"eps": float(eps), "x_r": flat.stride(0), "D": channels}
    launch(rms_norm_rows, (flat.shape[0],), {**arguments, **sizes}, config)
    return y, scale


def rms_norm_vjp(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, scale: Tensor, mask: Mask
) -> tuple[Tensor | None, Tensor | None]:
    """Cotangents of x, with `dresidual` added, and of weight."""
    channels, count = x.shape[-1], scale.numel()
    if is_wide(x, weight) or channels > LARGEST:
        return torch_norm.rms_norm_vjp(dy, dresidual, x, weight, scale, mask)
    config = choose("rms_norm_vjp", dy.device, channels=channels)
    rows = segments(max(1, count), 1, INTERVAL, dy.device)
    programs = -(-count // rows)
    dx = x.new_empty(x.shape) if mask[0] else None
    dweight = x.new_empty((programs, channels), dtype=torch.float32) if mask[1] and weight is not None else None
    tensors = {"dy": _rows(dy), "dresidual": None if dresidual is None else _rows(dresidual), "x": _rows(x)}
    moves = {f"{name}_r": 0 if t is None else t.stride(0) for name, t in tensors.items()}
    rest = {"weight": parameter(weight), "scale": scale.contiguous(), "dx": dx, "dweight": dweight}
    launch(rms_norm_vjp_rows, (programs,), {**tensors, **moves, **rest, "R": count, "D": channels, "rows": rows}, config)
    return dx, None if dweight is None or weight is None else dweight.sum(0).to(weight.dtype)
