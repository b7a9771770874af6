"""`adjcomp::rms_norm` on a CPU: rms_norm.cpp, or the torch form for lower precision and where there is no compiler."""

from __future__ import annotations

import ctypes

from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import torch_norm
from adjcomp.runtime.kernels.cpu.native import Matrix, dense, load, rows, run, suffix, threads_for


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of rms_norm.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "channels", "threads")),
        ("eps", ctypes.c_double),
        *((name, Matrix) for name in ("x", "y", "dy", "dresidual", "dx")),
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "dweight")),
    )


def _is_native(x: Tensor) -> bool:
    return x.dtype is state_dtype(x) and x.numel() > 0 and load("rms_norm") is not None


def _matrix(t: Tensor) -> Tensor:
    """(1, rows, D), as `rows` wants it."""
    return rows(t.reshape(1, -1, t.shape[-1]), t.dtype)


def _sizes(x: Tensor) -> dict[str, int]:
    return {"count": x.numel() // x.shape[-1], "channels": x.shape[-1], "threads": threads_for(x.numel())}


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.rms_norm`; also 1 / rms of each row, (...)."""
    if not _is_native(x):
        return torch_norm.rms_norm(x, weight, eps)
    y, scale = x.new_empty(x.shape), x.new_empty(x.shape[:-1])
    values = {"x": _matrix(x), "y": _matrix(y), "weight": dense(weight, x.dtype), "scale": scale, "eps": eps, **_sizes(x)}
    run("rms_norm", f"forward_{suffix(x.dtype)}", Arguments, values)
    return y, scale


def rms_norm_vjp(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, scale: Tensor, mask: Mask
) -> tuple[Tensor | None, Tensor | None]:
    """Cotangents of x, with `dresidual` added, and of weight."""
    if not _is_native(x):
        return torch_norm.rms_norm_vjp(dy, dresidual, x, weight, scale, mask)
    dx = x.new_empty(x.shape) if mask[0] else None
    dweight = x.new_empty(x.shape[-1:]) if mask[1] and weight is not None else None
    values = {
        "x": _matrix(x),
        "dy": _matrix(dy),
        "dresidual": None if dresidual is None else _matrix(dresidual),
        "dx": None if dx is None else _matrix(dx),
        "weight": dense(weight, x.dtype),
        "scale": scale.contiguous(),
        "dweight": dweight,
        **_sizes(x),
    }
    run("rms_norm", f"vjp_{suffix(x.dtype)}", Arguments, values)
    return dx, dweight
