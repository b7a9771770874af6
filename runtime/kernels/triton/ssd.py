"""`adjcomp::ssd` on a GPU, its VJP, and the summaries of a range of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from adjcomp.ops.dual import CHECKPOINT_STEPS
from adjcomp.runtime.kernels import summaries
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like
from adjcomp.runtime.kernels.cpu import chunked_ssd
from adjcomp.runtime.kernels.triton import ssd_kernels as kernels
from adjcomp.runtime.kernels.triton import ssd_vjp_kernels as vjp_kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, operands, parameter, strides, timed

LARGEST = 256  # channels of a head, and states
HEADS_PER_SET = 8  # heads whose dB and dC one program adds up


@dataclass(frozen=True)
class _Call:
    """Sizes of one call, its options, and its parameters as float32."""

    batch: int
    steps: int
    heads: int
    width: int
    groups: int
    states: int
    A: Tensor
    bias: Tensor | None
    softplus: bool
    limit: tuple[float, float] | None
    products: dict[str, Any]

    @property
    def chunks(self) -> int:
        return -(-self.steps // CHECKPOINT_STEPS)

    @property
    def per_group(self) -> int:
        return self.heads // self.groups

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = {"T": self.steps, "H": self.heads, "P": self.width, "N": self.states, "per_group": self.per_group}
        return {**sizes, **self.products, "chunks": self.chunks, "Q": CHECKPOINT_STEPS}

    @property
    def step_options(self) -> dict[str, Any]:
        """How dt becomes δ."""
        low, high = self.limit or (0.0, 0.0)
        options = {"SOFTPLUS": self.softplus, "LIMITED": self.limit is not None, "low": low, "high": high}
        return {**options, "A": self.A, "bias": self.bias}

    def config(self, kernel: str) -> Config:
        wide = int(self.products["OPERAND"] == tl.float32)
        return choose(kernel, self.A.device, states=self.states, width=self.width, float32=wide)

    def room(self, *sizes: int) -> Tensor:
        """An uninitialised float32 tensor (batch, *sizes)."""
        return self.A.new_empty((self.batch, *sizes), dtype=torch.float32)


def _call(
    x: Tensor, A: Tensor, B: Tensor, others: list[Tensor | None], bias: Tensor | None, softplus: bool, limit: list[float] | None
) -> _Call:
    """`others` are the remaining tensors that enter matrix products."""
    batch, steps, heads, width = x.shape
    groups, states = B.shape[2:]
    for name, size in (("x", width), ("B", states)):
        if size > LARGEST:
            raise ValueError(f"adjcomp.ops.ssd: `{name}` has {size} channels per head; supported on a GPU: up to {LARGEST}")
    bounds = None if limit is None else (limit[0], limit[1])
    products = operands(x, B, *others)
    return _Call(batch, steps, heads, width, groups, states, parameter(A), parameter(bias), softplus, bounds, products)


def _moves(rows: dict[str, Tensor | None]) -> dict[str, int]:
    return {k: v for name, t in rows.items() for k, v in strides(name, t).items()}


def _steps(call: _Call, dt: Tensor) -> dict[str, Tensor]:
    """δ in float32 and the sums of log decays in float64, both (batch, H, chunks * Q)."""
    config = choose("ssd_steps", dt.device)
    delta = call.room(call.heads, call.chunks * CHECKPOINT_STEPS)
    log = call.A.new_empty(delta.shape, dtype=torch.float64)
    arguments = {**call.step_options, "dt": dt, "delta": delta, "log": log, **strides("dt", dt)}
    sizes = {"T": call.steps, "H": call.heads, "chunks": call.chunks, "Q": CHECKPOINT_STEPS}
    grid = (call.batch * call.chunks, -(-call.heads // config.constants["BLOCK_H"]))
    launch(kernels.ssd_steps, grid, {**arguments, **sizes}, config)
    return {"delta": delta, "log": log}


def _local(call: _Call, x: Tensor, B: Tensor, z: Tensor | None, sums: dict[str, Tensor], reverse: bool) -> Tensor:
    """Every chunk's own state in its slot of (batch, chunks + 1, H, P, N)."""
    config = call.config("ssd_local")
    ends = call.room(call.chunks + 1, call.heads, call.width, call.states)
    rows = {"x": x, "B": B, "z": z}
    blocks = -(-call.width // config.constants["BLOCK_P"]) * -(-call.states // config.constants["BLOCK_N"])
    arguments = {**call.sizes, **rows, **_moves(rows), **sums, "ends": ends, "REVERSE": reverse}
    launch(kernels.ssd_local, (call.batch * call.chunks, call.heads, blocks), arguments, config)
    return ends


def _join(call: _Call, log: Tensor, states: Tensor, first: Tensor | None, out: Tensor | None, reverse: bool) -> None:
    """Turn the chunks' own states into those between chunks, in place."""
    config = choose("ssd_join", log.device)
    size = call.width * call.states
    arguments = {"log": log, "states": states, "first": first, "out": out, "H": call.heads, "size": size, "Q": CHECKPOINT_STEPS}
    grid = (call.batch, call.heads, -(-size // config.constants["BLOCK"]))
    launch(kernels.ssd_join, grid, {**arguments, "chunks": call.chunks, "REVERSE": reverse}, config)


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
    """See `adjcomp.ops.ssd`; also returns the states before each chunk and after the last, (batch, chunk, H, P, N)."""
    if is_wide(x, dt, A, B, C, D, z, dt_bias, h0):
        return chunked_ssd.ssd(x, dt, A, B, C, D, z, dt_bias, h0, dt_softplus, dt_limit)
    call = _call(x, A, B, [C], dt_bias, dt_softplus, dt_limit)
    y = x.new_empty(x.shape)
    last = call.room(call.heads, call.width, call.states)
    rows = {"x": timed(x), "B": timed(B), "C": timed(C), "z": timed(z)}
    sums = _steps(call, timed(dt))
    states = _local(call, timed(x), timed(B), None, sums, False)
    _join(call, sums["log"], states, parameter(h0), last, False)
    config = call.config("ssd_outputs")
    grid = (call.batch * call.chunks, call.heads, -(-call.width // config.constants["BLOCK_P"]))
    given = {"skip": parameter(D), "states": states, "y": y}
    launch(kernels.ssd_outputs, grid, {**call.sizes, **rows, **_moves(rows), **sums, **given}, config)
    return y, last, states


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
    """See `adjcomp.ops.ssd`: cotangents of (x, dt, A, B, C, D, z, dt_bias, h0)."""
    if is_wide(states):
        return chunked_ssd.ssd_vjp(dy, dh_last, x, dt, A, B, C, D, z, dt_bias, states, dt_softplus, dt_limit, mask)
    dy = torch.zeros_like(x) if dy is None else dy
    call = _call(x, A, B, [C, dy], dt_bias, dt_softplus, dt_limit)
    sums = _steps(call, timed(dt))
    adjoints = _local(call, timed(dy), timed(C), timed(z), sums, True)
    _join(call, sums["log"], adjoints, parameter(dh_last), None, True)
    rows = {"dy": timed(dy), "x": timed(x), "B": timed(B), "C": timed(C), "z": timed(z)}
    given = {**call.sizes, **rows, **_moves(rows), **sums}
    dz = None if z is None else z.new_empty(z.shape)
    seen, dD = _gate_vjp(call, {**given, "skip": parameter(D), "states": states, "dz": dz})
    dx = x.new_empty(x.shape)
    parts = _input_vjp(call, {**given, "skip": parameter(D), "states": states, "adjoints": adjoints, "dx": dx})
    ddt, dA = _decay_vjp(call, {**given, **parts, "seen": seen}, timed(dt))
    dB = _shared_vjp(call, rows, sums, adjoints, True) if mask[3] else None
    dC = _shared_vjp(call, rows, sums, states, False) if mask[4] else None
    dbias = ddt.sum((0, 1)) if dt_bias is not None and mask[7] else None
    like: list[Tensor | None] = [x, dt, A, B, C, D, z, dt_bias]
    grads = cast_like([dx, ddt, dA, dB, dC, dD, dz, dbias], like, mask[:8])
    return (*grads, adjoints[:, 0].contiguous() if mask[8] else None)


def _blocks(call: _Call, config: Config) -> tuple[int, int, int]:
    """The grid over chunks, heads and blocks of channels."""
    return call.batch * call.chunks, call.heads, -(-call.width // config.constants["BLOCK_P"])


def _gate_vjp(call: _Call, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What decays from a chunk's start to each step, (batch, parts, H, chunks * Q), and dD (H,); writes dz."""
    config = call.config("ssd_vjp_gates")
    grid = _blocks(call, config)
    seen, dskip = call.room(grid[2], call.heads, call.chunks * CHECKPOINT_STEPS), call.room(grid[2], call.chunks, call.heads)
    launch(vjp_kernels.ssd_vjp_gates, grid, {**given, "seen": seen, "dskip": dskip}, config)
    return seen, dskip.sum((0, 1, 2))


def _input_vjp(call: _Call, given: dict[str, Any]) -> dict[str, Tensor]:
    """Parts of δ's cotangent, and the products that decay from each step to the chunk's end, or over it; writes dx."""
    config = call.config("ssd_vjp_inputs")
    grid = _blocks(call, config)
    shape = (grid[2], call.heads, call.chunks * CHECKPOINT_STEPS)
    parts = {"ddelta": call.room(*shape), "carried": call.room(*shape), "spanning": call.room(grid[2], call.chunks, call.heads)}
    launch(vjp_kernels.ssd_vjp_inputs, grid, {**given, **parts}, config)
    return parts


def _decay_vjp(call: _Call, given: dict[str, Any], dt: Tensor) -> tuple[Tensor, Tensor]:
    """ddt (batch, T, H) in float32 and dA (H,)."""
    config = call.config("ssd_vjp_decays")
    ddt, dA = call.room(call.steps, call.heads), call.room(call.chunks, call.heads)
    counts = {"seen_parts": given["seen"].shape[1], "parts": given["carried"].shape[1]}
    arguments = {**given, **call.step_options, **counts, "dt": dt, **strides("dt", dt), "ddt": ddt, "dA": dA}
    launch(vjp_kernels.ssd_vjp_decays, (call.batch * call.chunks, call.heads), arguments, config)
    return ddt, dA.sum((0, 1))


def _shared_vjp(call: _Call, rows: dict[str, Tensor | None], sums: dict[str, Tensor], states: Tensor, back: bool) -> Tensor:
    """dC, or for `back` dB, (batch, T, G, N), summed over the heads of each group."""
    config = call.config("ssd_vjp_shared")
    heads = min(HEADS_PER_SET, call.per_group)
    sets = -(-call.per_group // heads)
    out = call.room(sets, call.steps, call.groups, call.states)
    names = ("x", "dy", "C") if back else ("dy", "x", "B")
    used = {**dict(zip(("left", "right", "other"), (rows[name] for name in names), strict=True)), "z": rows["z"]}
    arguments = {**call.sizes, **used, **_moves(used), **sums, "states": states, "out": out}
    grid = (call.batch * call.chunks, call.groups * sets, -(-call.states // config.constants["BLOCK_N"]))
    launch(vjp_kernels.ssd_vjp_shared, grid, {**arguments, "G": call.groups, "heads": heads, "BACK": back}, config)
    return out[:, 0] if sets == 1 else out.sum(1)


def ssd_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: list[float] | None
) -> tuple[Tensor, Tensor]:
    """What a range of time does to any state: h_last = decay h0 + end; decay (batch, H, 1, 1), end (batch, H, P, N), float32."""
    if is_wide(x, dt, A, B, dt_bias):
        return summaries.ssd_summary(x, dt, A, B, dt_bias, dt_softplus, dt_limit)
    call = _call(x, A, B, [], dt_bias, dt_softplus, dt_limit)
    return _whole(call, timed(x), timed(dt), timed(B), None, False)


def ssd_adjoint_summary(
    dy: Tensor,
    dt: Tensor,
    A: Tensor,
    C: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: list[float] | None,
) -> tuple[Tensor, Tensor]:
    """What a range of time does to any adjoint state: dh0 = decay dh_last + end; shapes as those of `ssd_summary`."""
    if is_wide(dy, dt, A, C, z, dt_bias):
        return summaries.ssd_adjoint_summary(dy, dt, A, C, z, dt_bias, dt_softplus, dt_limit)
    call = _call(dy, A, C, [], dt_bias, dt_softplus, dt_limit)
    return _whole(call, timed(dy), timed(dt), timed(C), timed(z), True)


def _whole(call: _Call, x: Tensor, dt: Tensor, B: Tensor, z: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    sums, end = _steps(call, dt), call.room(call.heads, call.width, call.states)
    _join(call, sums["log"], _local(call, x, B, z, sums, reverse), None, end, reverse)
    whole = sums["log"].view(call.batch, call.heads, call.chunks, CHECKPOINT_STEPS)[..., -1].sum(-1)
    return torch.exp(whole).float()[..., None, None], end
