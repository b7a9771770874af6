"""`adjcomp::ssd` on a CPU: ssd.cpp, or the chunked torch form where there is no compiler."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from adjcomp.ops.dual import CHECKPOINT_STEPS
from adjcomp.ops.library import checkpoint_count, state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like, step_size, step_size_vjp
from adjcomp.runtime.kernels.cpu import chunked_ssd
from adjcomp.runtime.kernels.cpu.native import Heads, dense_of, groups, load, rows_of, run, suffix, threads_for


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of ssd_common.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "heads", "width", "groups", "states", "parts", "threads")),
        *((name, Heads) for name in ("x", "B", "C", "z", "y", "dy", "dx", "dz")),
        *((name, ctypes.c_void_p) for name in ("delta", "ddelta", "A", "D", "h0", "h_last", "kept", "dh_last")),
        *((name, ctypes.c_void_p) for name in ("dA", "dB", "dC", "dD", "dh0")),
    )


def _sizes(x: Tensor, B: Tensor) -> dict[str, int]:
    batch, steps, heads, width = x.shape
    shared, states = B.shape[2:]
    threads = threads_for(x.numel())
    return {
        "batch": batch,
        "steps": steps,
        "heads": heads,
        "width": width,
        "groups": shared,
        "states": states,
        "parts": groups(batch * shared, heads // shared, threads),
        "threads": threads,
    }


def ssd(
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
    dt_limit: list[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.ssd`; also returns the states before each chunk and after the last, each (N, P) in memory."""
    if load("ssd") is None or x.numel() == 0 or B.numel() == 0:
        return chunked_ssd.ssd(x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus, dt_limit)
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    state = (x.shape[2], x.shape[3], B.shape[3])
    delta = step_size(dt.to(wide), None if dt_bias is None else dt_bias.to(wide), dt_softplus, dt_limit)
    y = x.new_empty(x.shape, dtype=wide)
    h_last = x.new_empty((x.shape[0], *state), dtype=wide)
    kept = x.new_empty((x.shape[0], checkpoint_count(x.shape[1], CHECKPOINT_STEPS), *state), dtype=wide)
    timed = rows_of(wide, {"x": x, "B": B, "C": C, "z": z})
    values = {**timed, **dense_of(wide, {"delta": delta, "A": A, "D": D, "h0": h0})}
    run("ssd", f"forward_{suffix(wide)}", Arguments, {**_sizes(x, B), **values, "y": y, "h_last": h_last, "kept": kept})
    return y.to(x.dtype), h_last, kept


def ssd_vjp(
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
    dt_limit: list[float] | None,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (x, dt, A, B, C, D, z, dt_bias, h0)."""
    if load("ssd") is None or x.numel() == 0 or B.numel() == 0:
        return chunked_ssd.ssd_vjp(dy, dh_last, x, dt, A, B, C, D, z, dt_bias, states, dt_softplus, dt_limit, mask)
    wide, sizes = states.dtype, _sizes(x, B)
    raw, bias = dt.to(wide), None if dt_bias is None else dt_bias.to(wide)
    delta = step_size(raw, bias, dt_softplus, dt_limit)
    wanted = [keep and t is not None for keep, t in zip(mask, (x, dt, A, B, C, D, z, dt_bias, x), strict=True)]
    grads = _outputs(sizes, x, wide, wanted)
    timed = rows_of(wide, {"x": x, "B": B, "C": C, "z": z, "dy": dy})
    values = {**timed, **dense_of(wide, {"delta": delta, "A": A, "D": D, "dh_last": dh_last, "kept": states})}
    run("ssd", f"vjp_{suffix(wide)}", Arguments, {**sizes, **values, **grads})
    ddelta = grads["ddelta"]
    ddt = None if ddelta is None else step_size_vjp(ddelta, raw, bias, dt_softplus, dt_limit)
    dbias = ddt.sum((0, 1)) if ddt is not None and wanted[7] else None
    dA, dB, dC, dD = (_total(grads[name], axis) for name, axis in (("dA", 0), ("dB", 1), ("dC", 1), ("dD", 0)))
    found = [grads["dx"], ddt, dA, dB, dC, dD, grads["dz"], dbias]
    return (*cast_like(found, [x, dt, A, B, C, D, z, dt_bias], mask[:8]), grads["dh0"])


def _total(partial: Tensor | None, axis: int) -> Tensor | None:
    return None if partial is None else partial.sum(axis)


def _outputs(sizes: dict[str, int], x: Tensor, wide: torch.dtype, wanted: list[bool]) -> dict[str, Tensor | None]:
    """Room for the cotangents that are wanted, by field name; partial sums have an axis more."""
    batch, steps, heads, width = x.shape
    shared = (batch, sizes["parts"], steps, sizes["groups"], sizes["states"])
    shapes = {
        "dx": tuple(x.shape),
        "ddelta": (batch, steps, heads),
        "dA": (batch, heads),
        "dB": shared,
        "dC": shared,
        "dD": (batch, heads),
        "dz": tuple(x.shape),
        "dh0": (batch, heads, width, sizes["states"]),
    }
    keep = [wanted[0], wanted[1] or wanted[7], *wanted[2:7], wanted[8]]
    return {name: x.new_empty(shape, dtype=wide) if k else None for (name, shape), k in zip(shapes.items(), keep, strict=True)}
