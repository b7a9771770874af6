"""`adjcomp::causal_conv1d` on a CPU: causal_conv1d.cpp, or the torch form where there is no compiler."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like
from adjcomp.runtime.kernels.cpu import chunked_conv
from adjcomp.runtime.kernels.cpu.native import Matrix, dense, load, rows, run, suffix, threads_for


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of causal_conv1d.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "channels", "width", "silu", "threads")),
        *((name, Matrix) for name in ("x", "y", "dy", "dx", "tail", "tail_last", "dtail_last", "dtail")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "dweight", "dbias")),
        *((name, ctypes.c_void_p) for name in ("taps", "dtaps")),  # the kernel's own
    )


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    found = load("causal_conv1d")
    return found is not None and x.numel() > 0 and weight.shape[1] <= found.most_width()


def _common(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, silu: bool, wide: torch.dtype
) -> dict[str, int | Tensor | None]:
    batch, steps, channels = x.shape
    return {
        "batch": batch,
        "steps": steps,
        "channels": channels,
        "width": weight.shape[1],
        "silu": silu,
        "threads": threads_for(x.numel()),
        "x": rows(x, wide),
        "tail": dense(tail, wide) if weight.shape[1] > 1 else None,
        "weight": dense(weight, wide),
        "bias": dense(bias, wide),
    }


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.causal_conv1d`."""
    if not _has_kernel(x, weight):
        return chunked_conv.causal_conv1d(x, weight, bias, tail, silu)
    wide = state_dtype(x, weight, bias, tail)
    y = x.new_empty(x.shape, dtype=wide)
    tail_last = x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[2]), dtype=wide)
    values = {"y": y, "tail_last": tail_last if weight.shape[1] > 1 else None}
    run("causal_conv1d", f"forward_{suffix(wide)}", Arguments, {**_common(x, weight, bias, tail, silu, wide), **values})
    return y.to(x.dtype), tail_last


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
    if not _has_kernel(x, weight):
        return chunked_conv.causal_conv1d_vjp(dy, dtail_last, x, weight, bias, tail, silu, mask)
    wide, width = state_dtype(x, weight, bias, tail), weight.shape[1]
    dx = x.new_empty(x.shape, dtype=wide) if mask[0] else None
    dweight = x.new_empty(weight.shape, dtype=wide) if mask[1] else None
    dbias = x.new_empty(bias.shape, dtype=wide) if mask[2] and bias is not None else None
    dtail = None if not mask[3] or tail is None else x.new_zeros(tail.shape, dtype=wide)
    values = {
        **_common(x, weight, bias, tail, silu, wide),
        "dy": None if dy is None else rows(dy, wide),
        "dtail_last": None if dtail_last is None or width == 1 else dense(dtail_last, wide),
        "dx": dx,
        "dweight": dweight,
        "dbias": dbias,
        "dtail": dtail if width > 1 else None,
    }
    run("causal_conv1d", f"vjp_{suffix(wide)}", Arguments, values)
    return tuple(cast_like([dx, dweight, dbias, dtail], [x, weight, bias, tail], mask))
