"""`adjcomp::dense_scan` on a CPU: dense_scan.cpp for real numbers, the torch form for complex ones or without a compiler."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import chunked_scan
from adjcomp.runtime.kernels.cpu.native import Matrix, dense, load, rows, run, suffix, threads_for


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of dense_scan.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "size", "threads")),
        *((name, Matrix) for name in ("A", "b", "h", "dh", "dA", "db")),
        *((name, ctypes.c_void_p) for name in ("h0", "h_last", "dh_last", "dh0")),
    )


def _sizes(A: Tensor) -> dict[str, int]:
    return {"batch": A.shape[0], "steps": A.shape[1], "size": A.shape[2], "threads": threads_for(A.numel())}


def _served(wide: torch.dtype, A: Tensor) -> bool:
    return not wide.is_complex and A.numel() > 0 and load("dense_scan") is not None


def dense_scan(A: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.dense_scan`."""
    wide = state_dtype(A, b, h0)
    if not _served(wide, A):
        return chunked_scan.dense_scan(A, b, h0)
    h = b.new_empty(b.shape, dtype=wide)
    h_last = b.new_empty((b.shape[0], b.shape[2]), dtype=wide)
    values = {"A": rows(A.flatten(2), wide), "b": rows(b, wide), "h": h, "h0": dense(h0, wide), "h_last": h_last}
    run("dense_scan", f"forward_{suffix(wide)}", Arguments, {**_sizes(A), **values})
    return h.to(torch.promote_types(A.dtype, b.dtype)), h_last


def dense_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, A: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """Cotangents of (A, b, h0); that of b in h's dtype."""
    wide = state_dtype(A, h, h0)
    if not _served(wide, A):
        return chunked_scan.dense_scan_vjp(dh, dh_last, A, h, h0, mask)
    dA = h.new_empty((*A.shape[:2], A.shape[2] ** 2), dtype=wide) if mask[0] else None
    db = h.new_empty(h.shape, dtype=wide) if mask[1] else None
    dh0 = h.new_empty((h.shape[0], h.shape[2]), dtype=wide) if mask[2] and h0 is not None else None
    matrices = {"A": rows(A.flatten(2), wide), "h": rows(h, wide), "dh": None if dh is None else rows(dh, wide)}
    starts = {"h0": dense(h0, wide), "dh_last": dense(dh_last, wide), "dh0": dh0}
    run("dense_scan", f"vjp_{suffix(wide)}", Arguments, {**_sizes(A), **matrices, "dA": dA, "db": db, **starts})
    return (
        None if dA is None else dA.view(A.shape).to(A.dtype),
        None if db is None else db.to(h.dtype),
        None if dh0 is None or h0 is None else dh0.to(h0.dtype),
    )
