"""`adjcomp::linear_scan` on a CPU: linear_scan.cpp, or the torch form where there is no compiler."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import chunked_scan
from adjcomp.runtime.kernels.cpu.native import Matrix, dense, groups, load, matrix, rows, run, suffix, threads_for


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of linear_scan.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "channels", "groups", "threads")),
        *((name, Matrix) for name in ("a", "b", "h", "dh", "da", "db")),
        *((name, ctypes.c_void_p) for name in ("h0", "h_last", "dh_last", "dh0")),
    )


def _sizes(like: Tensor) -> dict[str, int]:
    batch, steps = like.shape[:2]
    channels = math.prod(like.shape[2:])
    threads = threads_for(like.numel())
    return {
        "batch": batch,
        "steps": steps,
        "channels": channels,
        "groups": groups(batch, -(-channels // 16), threads),
        "threads": threads,
    }


def _flat(t: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """(B, T, channels) with contiguous rows; a view where the strides allow it."""
    return None if t is None else rows(t.reshape(t.shape[0], t.shape[1], -1), wide)


def _view(t: Tensor | None) -> Tensor | Matrix | None:
    """As C++ reads it: strides count reals."""
    if t is None or not t.is_complex():
        return t
    view = matrix(t)
    return Matrix(view.data, 2 * view.batch_stride, 2 * view.time_stride)


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_scan`."""
    if load("linear_scan") is None or b.numel() == 0:
        return chunked_scan.linear_scan(a, b, h0)
    wide = state_dtype(a, b, h0)
    flat_a, flat_b, start = _flat(a, wide), _flat(b, wide), dense(h0, wide)
    h = b.new_empty(b.shape, dtype=wide)
    h_last = b.new_empty((b.shape[0], *b.shape[2:]), dtype=wide)
    out = h.view(b.shape[0], b.shape[1], -1)
    values = {"a": _view(flat_a), "b": _view(flat_b), "h": _view(out), "h0": start, "h_last": h_last}
    run("linear_scan", f"forward_{suffix(wide)}", Arguments, {**_sizes(b), **values})
    return h.to(torch.promote_types(a.dtype, b.dtype)), h_last


def linear_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, a: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """Cotangents of (a, b, h0); that of b in h's dtype."""
    if load("linear_scan") is None or h.numel() == 0:
        return chunked_scan.linear_scan_vjp(dh, dh_last, a, h, h0, mask)
    wide = state_dtype(a, h, h0)
    shape = (h.shape[0], h.shape[1], math.prod(h.shape[2:]))
    da, db = (h.new_empty(shape, dtype=wide) if keep else None for keep in mask[:2])
    dh0 = h.new_empty((h.shape[0], *h.shape[2:]), dtype=wide) if mask[2] and h0 is not None else None
    inputs = {"a": _flat(a, wide), "h": _flat(h, wide), "dh": _flat(dh, wide)}
    starts = {"h0": dense(h0, wide), "dh_last": dense(dh_last, wide), "dh0": dh0}
    matrices = {name: _view(t) for name, t in {**inputs, "da": da, "db": db}.items()}
    run("linear_scan", f"vjp_{suffix(wide)}", Arguments, {**_sizes(h), **matrices, **starts})
    return (
        None if da is None else da.view(h.shape).to(a.dtype),
        None if db is None else db.view(h.shape).to(h.dtype),
        None if dh0 is None or h0 is None else dh0.to(h0.dtype),
    )
