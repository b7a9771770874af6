"""`adjcomp::linear_scan` on a GPU, its VJP, and the summaries of a range of time.

Every tensor reaches the kernels as (B, T, channels, parts): inner dimensions flattened, complex numbers as two reals. double and
complex128 run in the torch form, since the kernels compute in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.runtime.kernels import summaries
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import chunked_scan
from adjcomp.runtime.kernels.triton import linear_scan_kernels as kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose, segments
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter, strides, timed

INTERVAL = 16  # fewest steps of a segment


@dataclass(frozen=True)
class _Shape:
    """Sizes of one call and how time is cut."""

    batch: int
    steps: int
    channels: int
    segment: int
    count: int
    complex_: bool
    config: Config

    @property
    def common(self) -> dict[str, int | bool]:
        return {"T": self.steps, "D": self.channels, "segment": self.segment, "count": self.count, "COMPLEX": self.complex_}

    @property
    def blocks(self) -> int:
        return -(-self.channels // self.config.constants["BLOCK_D"])

    @property
    def grid(self) -> tuple[int, int]:
        return self.batch * self.count, self.blocks

    def states(self, like: Tensor, count: int | None = None) -> Tensor:
        """Room for `count` states per sequence, (B, count, D, parts) in float32."""
        shape = (self.batch, self.count if count is None else count, self.channels, 2 if self.complex_ else 1)
        return like.new_empty(shape, dtype=torch.float32)


def _shape(t: Tensor) -> _Shape:
    batch, steps, channels = t.shape[0], t.shape[1], math.prod(t.shape[2:])
    config = choose("linear_scan", t.device, channels=channels)
    programs = batch * -(-channels // config.constants["BLOCK_D"])
    segment = segments(steps, max(1, programs), INTERVAL, t.device)
    return _Shape(batch, steps, channels, segment, -(-steps // segment), t.is_complex(), config)


def _summaries(shape: _Shape, a: Tensor, b: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Decay product and end of every segment, (B, segments, D, parts)."""
    decay, end = shape.states(a), shape.states(a)
    arguments = {"a": a, "b": b, "decay": decay, "end": end, **strides("a", a), **strides("b", b), "REVERSE": reverse}
    launch(kernels.linear_scan_summary, shape.grid, {**arguments, **shape.common}, shape.config)
    return decay, end


def _entries(shape: _Shape, a: Tensor, b: Tensor | None, first: Tensor | None, reverse: bool) -> Tensor | None:
    """The state that enters each segment, (B, segments, D, parts); None for zeros."""
    if shape.count == 1 or (b is None and first is None):
        return first
    decay, end = _summaries(shape, a, b, reverse)
    entry = shape.states(a)
    _join(shape, decay, end, first, entry, None, reverse)
    return entry


def _join(
    shape: _Shape, decay: Tensor, end: Tensor, first: Tensor | None, entry: Tensor | None, out: Tensor | None, reverse: bool
) -> None:
    arguments = {"decay": decay, "end": end, "first": first, "entry": entry, "out": out, "D": shape.channels}
    options = {"count": shape.count, "REVERSE": reverse, "COMPLEX": shape.complex_}
    launch(kernels.linear_scan_join, (shape.batch, shape.blocks), {**arguments, **options}, shape.config)


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_scan`; a, b: (B, T, *S)."""
    if is_wide(a, b, h0):
        return chunked_scan.linear_scan(a, b, h0)
    shape = _shape(b)
    h = b.new_empty(b.shape, dtype=torch.promote_types(a.dtype, b.dtype))
    last = b.new_empty((b.shape[0], *b.shape[2:]), dtype=torch.complex64 if b.is_complex() else torch.float32)
    a, b = timed(a), timed(b)
    arguments = {"a": a, "b": b, "entry": _entries(shape, a, b, parameter(h0), False), "h": timed(h), "last": parameter(last)}
    launch(
        kernels.linear_scan_outputs, shape.grid, {**arguments, **strides("a", a), **strides("b", b), **shape.common}, shape.config
    )
    return h, last


def linear_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, a: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """See `adjcomp.ops.linear_scan`: cotangents of a, b and h0."""
    if is_wide(a, h, h0):
        return chunked_scan.linear_scan_vjp(dh, dh_last, a, h, h0, mask)
    shape = _shape(h)
    da = a.new_empty(a.shape) if mask[0] else None
    db = h.new_empty(h.shape) if mask[1] else None
    dh0 = h0.new_empty(h0.shape, dtype=torch.promote_types(h0.dtype, torch.float32)) if mask[2] and h0 is not None else None
    a, h = timed(a), timed(h)
    cotangent = timed(dh)
    arguments = {
        "dh": cotangent,
        "a": a,
        "h": h,
        "h0": parameter(h0),
        "entry": _entries(shape, a, cotangent, parameter(dh_last), True),
        "da": timed(da),
        "db": timed(db),
        "dh0": parameter(dh0),
        **strides("dh", cotangent),
        **strides("a", a),
        **strides("h", h),
    }
    launch(kernels.linear_scan_vjp, shape.grid, {**arguments, **shape.common}, shape.config)
    return da, db, dh0 if dh0 is None or h0 is None else dh0.to(h0.dtype)


def linear_scan_summary(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a range of time does to any state: h_last = decay h0 + end; both (B, *S) in float32 or complex64."""
    if is_wide(a, b):
        return summaries.linear_scan_summary(a, b)
    return _whole(a, b, False)


def linear_scan_adjoint_summary(dh: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """What a range of time does to any adjoint state: dh0 = decay dh_last + end; both (B, *S) in float32 or complex64."""
    if is_wide(dh, a):
        return summaries.linear_scan_adjoint_summary(dh, a)
    return _whole(a, dh, True)


def _whole(a: Tensor, b: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    shape = _shape(b)
    wide = torch.complex64 if b.is_complex() else torch.float32
    end = b.new_empty((b.shape[0], *b.shape[2:]), dtype=wide)
    decay = torch.empty_like(end)
    decays, ends = _summaries(shape, timed(a), timed(b), reverse)
    _join(shape, decays, ends, None, None, parameter(end), reverse)
    zero = torch.zeros_like(ends)
    one = torch.zeros_like(ends[:, 0])
    one[..., 0] = 1
    _join(shape, decays, zero, one, None, parameter(decay), reverse)
    return decay, end
