"""The gated delta rule's steps on a GPU that its forward and its VJP share; names as in `gated_delta_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from adjcomp.ops.delta import CHECKPOINT_STEPS
from adjcomp.runtime.kernels.triton import gated_delta_kernels as kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import operands, strides, timed

LARGEST = 256  # key or value channels of a head
SUB = 16  # steps of a sub-block, where each channel has a decay


@dataclass(frozen=True)
class Call:
    """Sizes of one call."""

    batch: int
    steps: int
    heads: int
    keys: int
    values: int
    wide: bool  # a decay per key channel
    products: dict[str, Any]
    device: torch.device

    @property
    def chunks(self) -> int:
        return -(-self.steps // CHECKPOINT_STEPS)

    @property
    def padded(self) -> int:
        """Steps of time in whole chunks."""
        return self.chunks * CHECKPOINT_STEPS

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = {"T": self.steps, "H": self.heads, "K": self.keys, "V": self.values, "chunks": self.chunks}
        return {**sizes, **self.products, "WIDE": self.wide, "Q": CHECKPOINT_STEPS}

    @property
    def exact(self) -> str:
        """Precision of products of float32 factors."""
        return "tf32" if self.products["OPERAND"] == tl.bfloat16 else str(self.products["PRECISION"])

    def pick(self, *names: str) -> dict[str, Any]:
        return {name: self.sizes[name] for name in names}

    def config(self, kernel: str) -> Config:
        coarse = int(self.products["OPERAND"] == tl.float32)
        return choose(kernel, self.device, keys=self.keys, values=self.values, float32=coarse)

    def room(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor (batch, *sizes)."""
        return torch.zeros(0, dtype=dtype, device=self.device).new_empty((self.batch, *sizes))

    def square(self) -> Tensor:
        return self.room(self.heads, self.chunks, CHECKPOINT_STEPS, CHECKPOINT_STEPS)

    def grid(self, *blocks: int) -> tuple[int, ...]:
        return (self.batch * self.chunks, self.heads, *blocks)


def count_blocks(size: int, config: Config, name: str) -> int:
    return -(-size // config.constants[name])


def moves_of(rows: dict[str, Tensor | None]) -> dict[str, int]:
    return {k: v for name, t in rows.items() for k, v in strides(name, t).items()}


def call_of(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Call:
    batch, steps, heads, values = v.shape
    for name, size in (("k", k.shape[3]), ("v", values)):
        if size > LARGEST:
            limit = f"supported on a GPU: up to {LARGEST}"
            raise ValueError(f"adjcomp.ops.gated_delta_rule: `{name}` has {size} channels per head; {limit}")
    return Call(batch, steps, heads, k.shape[3], values, g.dim() == 4, operands(q, k, v), v.device)


@dataclass(frozen=True)
class Prepared:
    """What the forward and the VJP of a span share; names as in `gated_delta_kernels`."""

    rows: dict[str, Tensor]  # q, k, v as kernels take them
    log: Tensor
    betas: Tensor
    of_keys: Tensor  # Akk
    of_queries: Tensor  # Aqk
    inverse: Tensor  # Y
    solved: Tensor  # Y V; the VJP overwrites it
    moved: Tensor  # Y K̂
    moves: Tensor  # M

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        return self.log, self.betas


def sums_of(call: Call, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of log decays from each chunk's start, and β."""
    config, betas = call.config("delta_steps"), call.room(call.heads, call.padded)
    log = call.room(call.heads, call.padded, dtype=torch.float64)
    given = {"g": None if call.wide else g, "beta": beta, "log": None if call.wide else log, "betas": betas}
    options = {**moves_of({"g": given["g"], "beta": beta}), **call.pick("T", "H", "chunks", "Q")}
    grid = (call.batch * call.chunks, count_blocks(call.heads, config, "BLOCK_H"))
    launch(kernels.delta_steps, grid, {**given, **options}, config)
    if call.wide:
        config, log = call.config("delta_sums"), call.room(call.heads, call.padded, call.keys)
        options = {"g": g, "log": log, **strides("g", g), **call.pick("T", "H", "K", "chunks", "Q")}
        launch(kernels.delta_sums, call.grid(count_blocks(call.keys, config, "BLOCK_K")), options, config)
    return log, betas


def scores(call: Call, q: Tensor, k: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Akk and Aqk, (batch, H, chunks, Q, Q)."""
    made = {"of_keys": call.square(), "of_queries": call.square()}
    given = {"q": q, "k": k, "log": log, **made, **moves_of({"q": q, "k": k}), **call.pick("T", "H", "K", "chunks", "Q")}
    if call.wide:
        grid = call.grid(CHECKPOINT_STEPS // SUB)
        launch(kernels.delta_scores_wide, grid, {**given, "PRECISION": call.exact}, call.config("delta_scores_wide"))
    else:
        launch(kernels.delta_scores, call.grid(), {**given, **call.products}, call.config("delta_scores"))
    return made["of_keys"], made["of_queries"]


def inverse_of(call: Call, of_keys: Tensor, betas: Tensor) -> Tensor:
    config, out = call.config("delta_invert"), call.square()
    given = {"of_keys": of_keys, "betas": betas, "out": out, **call.pick("H", "chunks", "Q")}
    launch(kernels.delta_invert, call.grid(count_blocks(CHECKPOINT_STEPS, config, "BLOCK_J")), given, config)
    return out


def multiply(
    call: Call,
    matrix: Tensor,
    source: Tensor,
    sums: tuple[Tensor, Tensor],
    inside: bool,
    transpose: bool = False,
    scale: bool = False,
    decay: bool = False,
) -> Tensor:
    """(batch, H, padded, C): a matrix of each chunk times source, (batch, T, H, C), or `inside`: (batch, H, padded, C)."""
    config, channels = call.config("delta_multiply"), source.shape[3]
    out = call.room(call.heads, call.padded, channels)
    time, head = (2, 1) if inside else (1, 2)
    moves = {"source_b": source.stride(0), "source_h": source.stride(head), "source_t": source.stride(time)}
    # what isn't read is left out: equal programs are compiled once
    given = {
        "matrix": matrix,
        "source": source,
        "betas": sums[1] if scale else None,
        "log": sums[0] if decay else None,
        "out": out,
    }
    options = {"TRANSPOSE": transpose, "SCALE": scale, "DECAY": decay, "WIDE": decay and call.wide, **call.products}
    sizes = {**call.pick("H", "K", "chunks", "Q"), "T": source.shape[time], "C": channels}
    grid = call.grid(count_blocks(channels, config, "BLOCK_C"))
    launch(kernels.delta_multiply, grid, {**given, **moves, **options, **sizes}, config)
    return out


def outer(
    call: Call,
    left: Tensor,
    right: Tensor,
    sums: tuple[Tensor, Tensor],
    out: Tensor,
    inside: bool,
    forwards: bool,
    taken: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Each chunk's sum over time of left (batch, T, H, K) and right (as the source of `_multiply`), into a slot of `out`.

    Forwards left decays to the chunk's end and counts β times, else it decays from its start; `taken` is what is taken off.
    """
    config, channels = call.config("delta_outer"), right.shape[3]
    time, head = (2, 1) if inside else (1, 2)
    moves = {"right_b": right.stride(0), "right_h": right.stride(head), "right_t": right.stride(time)}
    left2, right2 = taken or (None, None)
    slots = out[:, 1:] if forwards and out.shape[1] > call.chunks else out
    given = {"left": left, "right": right, "betas": sums[1], "log": sums[0], "left2": left2, "right2": right2, "out": slots}
    options = {"C": channels, "END": forwards, "SCALE": forwards, **call.products}
    sizes = {**call.pick("T", "H", "K", "chunks", "WIDE", "Q"), "right_T": right.shape[time]}
    moves = {**moves, **moves_of({"left": left, "left2": left2}), "out_b": out.stride(0)}
    arguments = {**given, **moves, **options, **sizes}
    count = count_blocks(call.keys, config, "BLOCK_K") * count_blocks(channels, config, "BLOCK_C")
    launch(kernels.delta_outer, call.grid(count), arguments, config)


def join(call: Call, sums: tuple[Tensor, Tensor], moves: Tensor, states: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """Turn the chunks' own states into those between chunks, in place; returns the last of them, (batch, H, K, V)."""
    config, out = call.config("delta_join"), call.room(call.heads, call.keys, states.shape[4])
    given = {"log": sums[0], "moves": moves, "states": states, "first": first, "out": out, "REVERSE": reverse}
    sizes = {**call.pick("H", "K", "chunks", "WIDE", "Q"), **call.products, "V": states.shape[4]}
    grid = (call.batch, call.heads, count_blocks(states.shape[4], config, "BLOCK_V"))
    launch(kernels.delta_join, grid, {**given, **sizes}, config)
    return out


def prepare(call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Prepared:
    rows = {"q": timed(q), "k": timed(k), "v": timed(v)}
    sums = sums_of(call, timed(g), timed(beta))
    of_keys, of_queries = scores(call, rows["q"], rows["k"], sums[0])
    inverse = inverse_of(call, of_keys, sums[1])
    solved = multiply(call, inverse, rows["v"], sums, False)
    moved = multiply(call, inverse, rows["k"], sums, False, decay=True)
    moves = call.room(call.chunks, call.heads, call.keys, call.keys)
    outer(call, rows["k"], moved, sums, moves, True, True)
    return Prepared(rows, *sums, of_keys, of_queries, inverse, solved, moved, moves)
