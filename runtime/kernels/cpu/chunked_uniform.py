"""Torch form of the counter-based uniforms; bit for bit what the C++ draws.

A chain of SplitMix64 finalisers (Steele, Lea, Flood 2014) mixes seed, node, outer index and time into a row key; the inner index
is the counter of that row's stream. int64 arithmetic wraps as uint64 does; only the shifts need a mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors."""
    value = (value ^ _shift(value, 30)) * _signed(FIRST)
    value = (value ^ _shift(value, 27)) * _signed(SECOND)
    return value ^ _shift(value, 31)


def counter_uniform(seed: Tensor, node: int, shape: list[int], time_dim: int, time_offset: Tensor, batch: int) -> Tensor:
    """See `adjcomp.ops.counter_uniform`."""
    device = seed.device
    steps, inner = shape[time_dim] // batch, math.prod(shape[time_dim + 1 :])
    outer = math.prod(shape[:time_dim]) * batch
    golden = _signed(GOLDEN)
    key = mix(mix(seed + golden) + _signed(node * GOLDEN))
    key = mix(key + torch.arange(outer, device=device) * golden)
    key = mix(key[:, None] + (torch.arange(steps, device=device) + time_offset) * golden)
    bits = mix(key[:, :, None] + torch.arange(1, inner + 1, device=device) * golden)
    return (_shift(bits, 40).to(torch.float32) * 2.0**-24).view(shape)
