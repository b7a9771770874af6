"""`adjcomp::counter_uniform` on a CPU: counter_uniform.cpp, or the torch form where there is no compiler (the same bits)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from adjcomp.runtime.kernels.cpu import chunked_uniform
from adjcomp.runtime.kernels.cpu.native import load, threads_for


def counter_uniform(seed: Tensor, node: int, shape: list[int], time_dim: int, time_offset: Tensor, batch: int) -> Tensor:
    """See `adjcomp.ops.counter_uniform`."""
    native = load("counter_uniform")
    if native is None:
        return chunked_uniform.counter_uniform(seed, node, shape, time_dim, time_offset, batch)
    out = torch.empty(shape, dtype=torch.float32)
    steps, inner = shape[time_dim] // batch, math.prod(shape[time_dim + 1 :])
    outer = math.prod(shape[:time_dim]) * batch
    numbers = (int(seed), node, int(time_offset), outer, steps, inner, threads_for(out.numel()))
    native.counter_uniform(*(ctypes.c_int64(n) for n in numbers), ctypes.c_void_p(out.data_ptr()))
    return out
