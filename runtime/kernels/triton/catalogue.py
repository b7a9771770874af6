"""The launches that are compiled ahead of time: those of every op, forward and VJP, at shapes of real models.

The ops are run on meta tensors while `launch` takes notes, so signatures, constants and alignment are those of real calls.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from adjcomp.runtime.kernels.triton import causal_conv1d, linear_scan, selective_scan
from adjcomp.runtime.kernels.triton.aot import TARGETS, Row, row
from adjcomp.runtime.kernels.triton.launch import Launch, recorded

STEPS = 4096
QUICK_TARGETS = ("sm_90",)
Call = Callable[[torch.dtype], None]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _linear_scan(dtype: torch.dtype) -> None:
    a, b, h0 = meta(1, STEPS, 2048, dtype=dtype), meta(1, STEPS, 2048, dtype=dtype), meta(1, 2048)
    linear_scan.linear_scan(a, b, h0)
    linear_scan.linear_scan_vjp(b, h0, a, b, h0, [True] * 3)


def _complex_scan(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        a, h0 = meta(1, STEPS, 1024, dtype=torch.complex64), meta(1, 1024, dtype=torch.complex64)
        linear_scan.linear_scan(a, a, h0)
        linear_scan.linear_scan_vjp(a, h0, a, a, h0, [True] * 3)


def _causal_conv1d(dtype: torch.dtype) -> None:
    x, weight, bias, tail = meta(1, STEPS, 2048, dtype=dtype), meta(2048, 4), meta(2048), meta(1, 3, 2048)
    causal_conv1d.causal_conv1d(x, weight, bias, tail, True)
    causal_conv1d.causal_conv1d_vjp(x, tail, x, weight, bias, tail, True, [True] * 4)


def _selective_scan(dtype: torch.dtype) -> None:
    for states in (16, 64, 256):
        x, A, B, skip = meta(1, STEPS, 2048, dtype=dtype), meta(2048, states), meta(1, STEPS, states, dtype=dtype), meta(2048)
        h0 = meta(1, 2048, states)
        _, _, kept = selective_scan.selective_scan(x, x, A, B, B, skip, x, skip, h0, True)
        selective_scan.selective_scan_vjp(x, h0, x, x, A, B, B, skip, x, skip, kept, True, [True] * 9)


CALLS: tuple[Call, ...] = (_linear_scan, _complex_scan, _causal_conv1d, _selective_scan)


@functools.cache
def launches(quick: bool = False) -> tuple[Launch, ...]:
    """Every distinct launch of the calls in bfloat16 and in float32 (`quick`: only the former)."""
    return distinct(CALLS, (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32))


def distinct(calls: tuple[Call, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Launch, ...]:
    """The launches that the calls make, each once."""
    found: dict[str, Launch] = {}
    for call in calls:
        for dtype in dtypes:
            with recorded() as notes:
                call(dtype)
            for note in notes:
                found.setdefault(repr(replace(note, kernel=note.name)), note)
    return tuple(found.values())


def compiled(quick: bool, kernels: str, targets: list[str] | None, workers: int) -> Iterator[Row]:
    """A row for each launch whose kernel's name contains `kernels` and each target, as `workers` processes deliver them."""
    wanted = targets or (QUICK_TARGETS if quick else list(TARGETS))
    found = [(index, target) for index, launch in enumerate(launches(quick)) if kernels in launch.name for target in wanted]
    with ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile, [quick] * len(found), found)


def _compile(quick: bool, job: tuple[int, str]) -> Row:
    """Runs in a process of its own, which finds the launch again by its place in the catalogue."""
    return row(launches(quick)[job[0]], job[1])
