"""`adjcomp::selective_scan` on a CPU: selective_scan.cpp, or the chunked torch form where there is no compiler."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from adjcomp.ops.library import checkpoint_count, state_dtype
from adjcomp.ops.selective import CHECKPOINT_STEPS
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like
from adjcomp.runtime.kernels.cpu import chunked_selective
from adjcomp.runtime.kernels.cpu.native import Matrix, dense_of, groups, load, required, rows_of, run, suffix, threads_for

MOST_VECTORS = 32  # vectors of channels in a task: what it reads ahead, and its states, then fit in L2


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of selective_scan.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "channels", "states", "groups", "threads", "softplus")),
        *((name, Matrix) for name in ("x", "dt", "B", "C", "z", "y", "dy", "dx", "ddt", "dz")),
        *((name, ctypes.c_void_p) for name in ("A", "D", "bias", "h0", "h_last", "kept", "dh_last")),
        *((name, ctypes.c_void_p) for name in ("dA", "dB", "dC", "dD", "dbias", "dh0")),
    )


@cache
def _lanes(wide: torch.dtype) -> int:
    found: int = getattr(required("selective_scan"), f"lanes_{suffix(wide)}")()
    return found


def _sizes(x: Tensor, A: Tensor, wide: torch.dtype, softplus: bool) -> dict[str, int]:
    batch, steps, channels = x.shape
    lanes = _lanes(wide)
    threads = threads_for(x.numel())
    vectors = -(-channels // lanes)
    parts = groups(batch, vectors, threads)
    parts *= -(-vectors // (parts * MOST_VECTORS))
    return {
        "batch": batch,
        "steps": steps,
        "channels": channels,
        "states": A.shape[1],
        "groups": parts,
        "threads": threads,
        "softplus": softplus,
    }


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.selective_scan`; also returns the states before each block and after the last, (batch, block, N, D)."""
    if load("selective_scan") is None or x.numel() == 0 or A.numel() == 0:
        return chunked_selective.selective_scan(x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus)
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    sizes = _sizes(x, A, wide, dt_softplus)
    y = x.new_empty(x.shape, dtype=wide)
    h_last = x.new_empty((x.shape[0], *A.shape), dtype=wide)
    kept = x.new_empty((x.shape[0], checkpoint_count(x.shape[1], CHECKPOINT_STEPS), A.shape[1], A.shape[0]), dtype=wide)
    timed = rows_of(wide, {"x": x, "dt": dt, "B": B, "C": C, "z": z})
    plain = dense_of(wide, {"A": A, "D": D, "bias": dt_bias, "h0": h0})
    outputs = {"y": y, "h_last": h_last, "kept": kept}
    run("selective_scan", f"forward_{suffix(wide)}", Arguments, {**sizes, **timed, **plain, **outputs})
    return y.to(x.dtype), h_last, kept


def selective_scan_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    dt_softplus: bool,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (x, dt, A, B, C, D, z, dt_bias, h0)."""
    if load("selective_scan") is None or x.numel() == 0 or A.numel() == 0:
        return chunked_selective.selective_scan_vjp(dy, dh_last, x, dt, A, B, C, D, z, dt_bias, states, dt_softplus, mask)
    wide = states.dtype
    sizes = _sizes(x, A, wide, dt_softplus)
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    wanted = [keep and t is not None for keep, t in zip(mask, (*inputs, x), strict=True)]
    grads = _outputs(sizes, x, wide, wanted)
    timed = rows_of(wide, {"x": x, "dt": dt, "B": B, "C": C, "z": z, "dy": dy})
    plain = dense_of(wide, {"A": A, "D": D, "bias": dt_bias, "dh_last": dh_last, "kept": states})
    run("selective_scan", f"vjp_{suffix(wide)}", Arguments, {**sizes, **timed, **plain, **grads})
    parameters = {name: _total(grads[name]) for name in _PER_BATCH}
    summed = [parameters.get(name, grads[name]) for name in _GRADS]
    return (*cast_like(summed, [*inputs], mask[:8]), grads["dh0"])


_GRADS = ("dx", "ddt", "dA", "dB", "dC", "dD", "dz", "dbias")
_PER_BATCH = ("dA", "dD", "dbias")  # of which the kernel leaves one per batch


def _total(parts: Tensor | None) -> Tensor | None:
    if parts is None:
        return None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _outputs(sizes: dict[str, int], x: Tensor, wide: torch.dtype, wanted: list[bool]) -> dict[str, Tensor | None]:
    """Room for the cotangents that are wanted, by field name."""
    batch, steps, channels, states = (sizes[name] for name in ("batch", "steps", "channels", "states"))
    shapes = {
        "dx": (batch, steps, channels),
        "ddt": (batch, steps, channels),
        "dA": (batch, channels, states),
        "dB": (batch, steps, states),
        "dC": (batch, steps, states),
        "dD": (batch, channels),
        "dz": (batch, steps, channels),
        "dbias": (batch, channels),
        "dh0": (batch, channels, states),
    }
    return {
        name: x.new_empty(shape, dtype=wide) if want else None for (name, shape), want in zip(shapes.items(), wanted, strict=True)
    }
