"""`adjcomp::counter_uniform` on a GPU: bit for bit what the CPU draws.

A chain of SplitMix64 finalisers (Steele, Lea, Flood 2014) mixes seed, node, outer index and time into a row key; the inner index
is the counter of that row's stream. Bytes: each number written once.

Legend: r rows (outer index and time), i inner index.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjcomp.runtime.kernels.triton.configs import choose
from adjcomp.runtime.kernels.triton.functions import slot
from adjcomp.runtime.kernels.triton.launch import launch


@triton.jit
def mixed(value):
    """SplitMix64's finaliser on uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def golden(value):
    """value times 2^64 over the golden ratio, modulo 2^64."""
    return value.to(tl.uint64) * 0x9E3779B97F4A7C15


@triton.jit
def counter_uniform_rows(seed, offset, out, node, rows, steps, inner, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr):
    """out (r, i) in float32; seed and offset are scalars in memory, so that the host need not know them."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    one = tl.full((), 1, tl.int64)
    key = mixed(mixed(tl.load(seed).to(tl.uint64) + golden(one)) + golden(one * node))
    key = mixed(key + golden(r // steps))
    key = mixed(key + golden(r % steps + tl.load(offset)))
    bits = mixed(key[:, None] + golden((i + 1).to(tl.int64))[None, :]) >> 40
    inside = (r < rows)[:, None] & (i < inner)[None, :]
    numbers = bits.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 24 bits times 2^-24
    tl.store(slot(out, r[:, None], 0, 1, inner) + i[None, :], numbers, mask=inside)


def counter_uniform(seed: Tensor, node: int, shape: list[int], time_dim: int, time_offset: Tensor, batch: int) -> Tensor:
    """See `adjcomp.ops.counter_uniform`."""
    steps, inner = shape[time_dim] // batch, math.prod(shape[time_dim + 1 :])
    rows = math.prod(shape[: time_dim + 1])
    out = seed.new_empty(tuple(shape), dtype=torch.float32)
    config = choose("counter_uniform", seed.device, inner=inner)
    grid = (-(-rows // config.constants["BLOCK_R"]), -(-inner // config.constants["BLOCK_I"]))
    arguments = {"seed": seed, "offset": time_offset, "out": out, "node": node, "rows": rows, "steps": steps, "inner": inner}
    launch(counter_uniform_rows, grid, arguments, config)
    return out
