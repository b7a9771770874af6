"""`adjcomp::selective_scan` on a GPU, its VJP, and the summaries of a range of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjcomp.ops.library import checkpoint_count
from adjcomp.ops.selective import CHECKPOINT_STEPS
from adjcomp.runtime.kernels import summaries
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like
from adjcomp.runtime.kernels.cpu import chunked_selective
from adjcomp.runtime.kernels.triton import selective_scan_kernels as kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose, segments
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.selective_scan_vjp_kernels import selective_scan_vjp as vjp_kernel
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter, strides, timed

VJP_SEGMENT = 2 * CHECKPOINT_STEPS  # shorter ones would move as much for their borders (mu, dA) as for three inputs
VJP_PROGRAMS = 4  # per processor at least, and fewer than twice as many: registers let 8 of its programs run at once


@dataclass(frozen=True)
class _Call:
    """What all kernels of one call share: sizes, how time is cut, and the parameters as float32, A as (N, D)."""

    batch: int
    steps: int
    channels: int
    states: int
    segment: int
    softplus: bool
    A_nd: Tensor
    bias: Tensor | None

    @property
    def count(self) -> int:
        """Segments of time."""
        return -(-self.steps // self.segment)

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = {"T": self.steps, "D": self.channels, "N": self.states, "segment": self.segment, "count": self.count}
        return {**sizes, "SOFTPLUS": self.softplus, "A": self.A_nd, "bias": self.bias}

    def config(self, kernel: str) -> Config:
        return choose(kernel, self.A_nd.device, states=self.states)

    def blocks(self, config: Config) -> int:
        """Programs side by side."""
        return _blocks(self.channels, config)

    def room(self, *sizes: int) -> Tensor:
        """An uninitialised float32 tensor (batch, *sizes)."""
        return self.A_nd.new_empty((self.batch, *sizes), dtype=torch.float32)


def _call(kernel: str, x: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, vjp: bool = False) -> _Call:
    """`kernel` is the one that walks the segments and should fill the device."""
    batch, steps, channels = x.shape
    programs = max(1, batch * _blocks(channels, choose(kernel, x.device, states=A.shape[1])))
    if vjp:
        segment = segments(steps, programs, VJP_SEGMENT, x.device, VJP_PROGRAMS)
    else:
        segment = segments(steps, programs, CHECKPOINT_STEPS, x.device)
    return _Call(batch, steps, channels, A.shape[1], segment, softplus, parameter(A.T), parameter(bias))


def _blocks(channels: int, config: Config) -> int:
    """Programs side by side: blocks of channels, of which a program may take several one after the other."""
    return -(-channels // (config.constants["BLOCK_D"] * config.constants.get("PASSES", 1)))


def _local(call: _Call, x: Tensor, dt: Tensor, B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sum of δ and local end state of the first `count` segments, (batch, count, D) and (batch, count, N, D)."""
    config = call.config("selective_scan_local")
    total, end = call.room(count, call.channels), call.room(count, call.states, call.channels)
    arguments = {**call.sizes, "x": x, "dt": dt, "B": B, "total": total, "end": end, "count": count}
    moves = {**strides("x", x), **strides("dt", dt), **strides("B", B)}
    launch(kernels.selective_scan_local, (call.batch * count, call.blocks(config)), {**arguments, **moves}, config)
    return total, end


def _adjoint_local(call: _Call, dy: Tensor, dt: Tensor, C: Tensor, z: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    """Sum of δ and local adjoint of the segments from `offset` on."""
    config = call.config("selective_scan_local")
    count = call.count - offset
    total, end = call.room(count, call.channels), call.room(count, call.states, call.channels)
    arguments = {**call.sizes, "dy": dy, "dt": dt, "C": C, "z": z, "total": total, "end": end, "count": count, "offset": offset}
    moves = {**strides("dy", dy), **strides("dt", dt), **strides("C", C), **strides("z", z)}
    launch(kernels.selective_scan_adjoint_local, (call.batch * count, call.blocks(config)), {**arguments, **moves}, config)
    return total, end


def _join(
    call: _Call,
    sums: tuple[Tensor, Tensor],
    first: Tensor | None,
    entry: Tensor | None,
    every: int,
    out: Tensor | None,
    reverse: bool,
) -> None:
    """Join segments; their entering states go to every `every`-th slot of `entry`, the leaving one to `out`."""
    config = choose("selective_scan_join", call.A_nd.device)
    arguments = {"total": sums[0], "end": sums[1], "A": call.A_nd, "first": first, "entry": entry, "out": out, "every": every}
    sizes = {"D": call.channels, "N": call.states, "count": sums[0].shape[1], "entries": 0 if entry is None else entry.shape[1]}
    grid = (call.batch, call.blocks(config), call.states)
    launch(kernels.selective_scan_join, grid, {**arguments, **sizes, "REVERSE": reverse}, config)


def _put(slot: Tensor, state: Tensor | None) -> None:
    """Write a state (batch, D, N), zeros when None, to a slot (batch, N, D)."""
    if state is None:
        slot.zero_()
    else:
        slot.copy_(state.mT)


def _padded(t: Tensor, steps: int) -> Tensor:
    """(batch, T, N) as float32 (batch, N, steps), zero from T on."""
    out = torch.zeros((t.shape[0], t.shape[2], steps), dtype=torch.float32, device=t.device)
    out[..., : t.shape[1]] = t.mT
    return out


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
    if is_wide(x, dt, A, B, C, D, z, dt_bias, h0):
        return chunked_selective.selective_scan(x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus)
    call = _call("selective_scan_outputs", x, A, dt_bias, dt_softplus)
    y = x.new_empty(x.shape)
    last = call.room(call.channels, call.states)
    states = call.room(int(checkpoint_count(call.steps, CHECKPOINT_STEPS)), call.states, call.channels)
    x, dt, B, C, z = timed(x), timed(dt), timed(B), timed(C), timed(z)
    if call.count == 1:
        _put(states[:, 0], h0)
    else:
        sums = _local(call, x, dt, B, call.count - 1)
        _join(call, sums, parameter(h0), states, call.segment // CHECKPOINT_STEPS, None, False)
    config = call.config("selective_scan_outputs")
    arguments = {"x": x, "dt": dt, "B": B, "C": C, "skip": parameter(D), "z": z, "states": states, "y": y, "last": last}
    moves = {k: v for name, t in (("x", x), ("dt", dt), ("B", B), ("C", C), ("z", z)) for k, v in strides(name, t).items()}
    grid = (call.batch * call.count, call.blocks(config))
    launch(kernels.selective_scan_outputs, grid, {**call.sizes, **arguments, **moves, "INTERVAL": CHECKPOINT_STEPS}, config)
    return y, last, states


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
    """See `adjcomp.ops.selective_scan`: cotangents of (x, dt, A, B, C, D, z, dt_bias, h0)."""
    if is_wide(states):
        return chunked_selective.selective_scan_vjp(dy, dh_last, x, dt, A, B, C, D, z, dt_bias, states, dt_softplus, mask)
    call = _call("selective_scan_vjp", x, A, dt_bias, dt_softplus, vjp=True)
    dx, ddt, dz = x.new_empty(x.shape), dt.new_empty(dt.shape), None if z is None else z.new_empty(z.shape)
    dy = torch.zeros_like(x) if dy is None else dy
    rows = {"dy": timed(dy), "x": timed(x), "dt": timed(dt), "z": timed(z)}
    mu = call.room(call.count, call.states, call.channels)
    if call.count == 1:
        _put(mu[:, 0], dh_last)
    else:
        sums = _adjoint_local(call, timed(dy), timed(dt), timed(C), timed(z), 1)
        _join(call, sums, parameter(dh_last), mu, 1, None, True)
    given = {"skip": parameter(D), "states": states, "mu": mu, "dx": dx, "ddt": ddt, "dz": dz}
    dA, dB, dC, dskip, dbias = _walk_back(call, {**rows, **given}, B, C)
    like: list[Tensor | None] = [x, dt, A, B, C, D, z, dt_bias]
    found = cast_like([dx, ddt, dA, dB, dC, dskip, dz, dbias], like, mask[:8])
    return (*found, mu[:, 0].mT.contiguous() if mask[8] else None)


def _walk_back(call: _Call, given: dict[str, Tensor | None], B: Tensor, C: Tensor) -> tuple[Tensor | None, ...]:
    """Run the VJP's kernel; returns dA (D, N), dB, dC (batch, T, N), dD and ddt_bias (D,), those of absent inputs None."""
    config = call.config("selective_scan_vjp")
    blocks, count = call.blocks(config), call.count
    padded = CHECKPOINT_STEPS * -(-call.steps // CHECKPOINT_STEPS)
    parked = CHECKPOINT_STEPS // config.constants["STEPS"] * call.states * config.constants["BLOCK_D"]
    dA = call.room(count, call.states, call.channels)
    dB, dC = call.room(blocks, call.states, padded), call.room(blocks, call.states, padded)
    dskip = None if given["skip"] is None else call.room(count, call.channels)
    dbias = None if call.bias is None else call.room(count, call.channels)
    sums = {"dA": dA, "dB": dB, "dC": dC, "dskip": dskip, "dbias": dbias, "scratch": call.room(count, blocks, parked)}
    moves = {k: v for name in ("dy", "x", "dt", "z") for k, v in strides(name, given[name]).items()}
    rest = {"B": _padded(B, padded), "C": _padded(C, padded), "padded": padded, "INTERVAL": CHECKPOINT_STEPS}
    launch(vjp_kernel, (call.batch * count, blocks), {**call.sizes, **given, **moves, **rest, **sums}, config)
    dB, dC = (t.sum(1)[..., : call.steps].mT for t in (dB, dC))
    return dA.sum((0, 1)).T, dB, dC, *(None if t is None else t.sum((0, 1)) for t in (dskip, dbias))


def selective_scan_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_softplus: bool
) -> tuple[Tensor, Tensor]:
    """What a range of time does to any state: h_last = decay h0 + end; both (batch, D, N) in float32."""
    if is_wide(x, dt, A, B, dt_bias):
        return summaries.selective_scan_summary(x, dt, A, B, dt_bias, dt_softplus)
    call = _call("selective_scan_local", x, A, dt_bias, dt_softplus)
    return _whole(call, _local(call, timed(x), timed(dt), timed(B), call.count), A, False)


def selective_scan_adjoint_summary(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool
) -> tuple[Tensor, Tensor]:
    """What a range of time does to any adjoint state: dh0 = decay dh_last + end; both (batch, D, N) in float32."""
    if is_wide(dy, dt, A, C, z, dt_bias):
        return summaries.selective_scan_adjoint_summary(dy, dt, A, C, z, dt_bias, dt_softplus)
    call = _call("selective_scan_local", dy, A, dt_bias, dt_softplus)
    return _whole(call, _adjoint_local(call, timed(dy), timed(dt), timed(C), timed(z), 0), A, True)


def _whole(call: _Call, sums: tuple[Tensor, Tensor], A: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    end = call.room(call.channels, call.states)
    _join(call, sums, None, None, 0, end, reverse)
    return torch.exp(sums[0].sum(1)[..., None] * A.float()), end
