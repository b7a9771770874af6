"""The launches that are compiled ahead of time: those of every op, forward and VJP, at shapes of real models.

The ops are run on meta tensors (the tuner gives them real ones) while `launch` takes notes, so signatures, constants and
alignment are those of real calls.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from adjcomp.runtime.kernels.triton import (
    causal_conv1d,
    counter_uniform,
    dense_scan,
    gated_delta_rule,
    linear_cross_entropy,
    linear_scan,
    rms_norm,
    selective_scan,
    ssd,
)
from adjcomp.runtime.kernels.triton.aot import TARGETS, Row, row
from adjcomp.runtime.kernels.triton.configs import Target, ahead
from adjcomp.runtime.kernels.triton.launch import Launch, recorded
from adjcomp.runtime.kernels.triton.resources import CHIPS

STEPS = 4096
QUICK_TARGETS = ("sm_90",)
HALF_TARGETS = ("sm_90", "gfx942")  # where float16 is compiled too
Results = Iterator[object]  # what the ops returned: tensors, or sequences of tensors and None
Call = Callable[[torch.dtype], Results]

_device = torch.device("meta")


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the device that `place` set, by default without data; small negative numbers, with which no recurrence grows."""
    if _device.type == "meta" or not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=_device)
    return -0.1 * torch.rand(shape, dtype=dtype, device=_device)


@contextlib.contextmanager
def place(device: torch.device) -> Iterator[None]:
    """Make the calls' tensors on a device."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def _linear_scan(dtype: torch.dtype) -> Results:
    a, b, h0 = tensor(1, STEPS, 2048, dtype=dtype), tensor(1, STEPS, 2048, dtype=dtype), tensor(1, 2048)
    yield linear_scan.linear_scan(a, b, h0)
    yield linear_scan.linear_scan_vjp(b, h0, a, b, h0, [True] * 3)


def _complex_scan(dtype: torch.dtype) -> Results:
    if dtype == torch.float32:
        a, h0 = tensor(1, STEPS, 1024, dtype=torch.complex64), tensor(1, 1024, dtype=torch.complex64)
        yield linear_scan.linear_scan(a, a, h0)
        yield linear_scan.linear_scan_vjp(a, h0, a, a, h0, [True] * 3)


def _causal_conv1d(dtype: torch.dtype) -> Results:
    x, weight, bias, tail = tensor(1, STEPS, 2048, dtype=dtype), tensor(2048, 4), tensor(2048), tensor(1, 3, 2048)
    yield causal_conv1d.causal_conv1d(x, weight, bias, tail, True)
    yield causal_conv1d.causal_conv1d_vjp(x, tail, x, weight, bias, tail, True, [True] * 4)


def _selective_scan(dtype: torch.dtype) -> Results:
    for states in (16, 64, 256):
        x, A, B, skip = (
            tensor(1, STEPS, 2048, dtype=dtype),
            tensor(2048, states),
            tensor(1, STEPS, states, dtype=dtype),
            tensor(2048),
        )
        h0 = tensor(1, 2048, states)
        *outputs, kept = selective_scan.selective_scan(x, x, A, B, B, skip, x, skip, h0, True)
        yield outputs
        yield selective_scan.selective_scan_vjp(x, h0, x, x, A, B, B, skip, x, skip, kept, True, [True] * 9)


def _ssd(dtype: torch.dtype) -> Results:
    for heads, width, states in ((32, 64, 128),):
        x, dt, A = tensor(1, STEPS, heads, width, dtype=dtype), tensor(1, STEPS, heads, dtype=dtype), tensor(heads)
        B, h0 = tensor(1, STEPS, 1, states, dtype=dtype), tensor(1, heads, width, states)
        *outputs, kept = ssd.ssd(x, dt, A, B, B, A, x, A, h0, True, [0.0, 1.0])
        yield outputs
        yield ssd.ssd_vjp(x, h0, x, dt, A, B, B, A, x, A, kept, True, [0.0, 1.0], [True] * 9)


def _dense_scan(dtype: torch.dtype) -> Results:
    for number in (dtype, torch.complex64) if dtype == torch.float32 else (dtype,):
        for states in (16, 64):
            A, b = tensor(1, STEPS, states, states, dtype=number), tensor(1, STEPS, states, dtype=number)
            h0 = tensor(1, states, dtype=torch.complex64 if number.is_complex else torch.float32)
            yield dense_scan.dense_scan(A, b, h0)
            yield dense_scan.dense_scan_vjp(b, h0, A, b, h0, [True] * 3)


def _counter_uniform(dtype: torch.dtype) -> Results:
    seed = tensor(dtype=torch.int64)
    for shape in ([1, STEPS, 2048], [1, STEPS]):
        yield counter_uniform.counter_uniform(seed, 3, shape, 1, seed, 1)


def _cross_entropy(dtype: torch.dtype) -> Results:
    x, weight, labels = tensor(1, STEPS, 2048, dtype=dtype), tensor(50304, 2048, dtype=dtype), tensor(1, STEPS, dtype=torch.int64)
    for rounded in (None, dtype):
        yield linear_cross_entropy.linear_cross_entropy(x, weight, labels, -100, rounded)
        norm = tensor(1, STEPS)
        yield linear_cross_entropy.linear_cross_entropy_vjp(tensor(), x, weight, labels, norm, -100, rounded, [True] * 2)


def _rms_norm(dtype: torch.dtype) -> Results:
    for channels in (1024, 2048, 4096, 8192):
        x, weight = tensor(1, STEPS, channels, dtype=dtype), tensor(channels, dtype=dtype)
        y, scale = rms_norm.rms_norm(x, weight, 1e-5)
        yield y
        yield rms_norm.rms_norm_vjp(y, x, x, weight, scale, [True] * 2)


def _gated_delta_rule(dtype: torch.dtype) -> Results:
    k, beta, h0 = tensor(1, STEPS, 16, 128, dtype=dtype), tensor(1, STEPS, 16, dtype=dtype), tensor(1, 16, 128, 128)
    for g in (tensor(1, STEPS, 16), tensor(1, STEPS, 16, 128)):
        *outputs, kept = gated_delta_rule.gated_delta_rule(k, k, k, g, beta, h0)
        yield outputs
        yield gated_delta_rule.gated_delta_rule_vjp(k, h0, k, k, k, g, beta, kept, [True] * 6)


CALLS: tuple[Call, ...] = (
    _linear_scan,
    _complex_scan,
    _causal_conv1d,
    _selective_scan,
    _ssd,
    _gated_delta_rule,
    _dense_scan,
    _counter_uniform,
    _cross_entropy,
    _rms_norm,
)


@functools.cache
def launches(target: str, quick: bool = False) -> tuple[Launch, ...]:
    """Every distinct launch of the calls on a target, in bfloat16 and in float32 (`quick`: only the former).

    float16 differs from bfloat16 in how numbers are converted, and from float32 in how they are read: one launch of each kernel
    that meets it shows that it compiles, for one target of each compiler.
    """
    chip = CHIPS[target]
    with ahead(Target(target, chip.shared_per_block, chip.processors)):
        if quick:
            return distinct(CALLS, (torch.bfloat16,))
        found = distinct(CALLS, (torch.bfloat16, torch.float32))
        if target not in HALF_TARGETS:
            return found
        halves: dict[str, Launch] = {}
        for launch in distinct(CALLS, (torch.float16,)):
            if "*fp16" in launch.signature.values():
                halves.setdefault(launch.name, launch)
        return (*found, *halves.values())


def exhaust(call: Call, dtype: torch.dtype) -> None:
    """Run a call for its launches."""
    deque(call(dtype), maxlen=0)


def distinct(calls: tuple[Call, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Launch, ...]:
    """The launches that the calls make, each once."""
    found: dict[str, Launch] = {}
    for call in calls:
        for dtype in dtypes:
            with recorded() as notes:
                exhaust(call, dtype)
            for note in notes:
                found.setdefault(repr(replace(note, kernel=note.name)), note)
    return tuple(found.values())


def compiled(quick: bool, kernels: str, targets: list[str] | None, workers: int) -> Iterator[Row]:
    """A row for each launch whose kernel's name contains `kernels` and each target, as `workers` processes deliver them.

    They are forked, and so find the launches made: making them takes a process some seconds.
    """
    wanted = targets or (QUICK_TARGETS if quick else list(TARGETS))
    found = [(i, target) for target in wanted for i, launch in enumerate(launches(target, quick)) if kernels in launch.name]
    with ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_compile, [quick] * len(found), found)


def _compile(quick: bool, job: tuple[int, str]) -> Row:
    """Runs in a process of its own; launches can't be sent to it, only their places in the catalogue."""
    index, target = job
    return row(launches(target, quick)[index], target)
