"""`adjcomp::dense_scan` on a GPU, its VJP, and the summaries of a range of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjcomp.runtime.kernels import summaries
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import chunked_scan
from adjcomp.runtime.kernels.triton import dense_scan_kernels as kernels
from adjcomp.runtime.kernels.triton.configs import Config, choose, segments
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter, strides, timed

INTERVAL = 16  # fewest steps of a segment
LARGEST = 64  # states


@dataclass(frozen=True)
class _Call:
    """Sizes of one call and how time is cut."""

    batch: int
    steps: int
    states: int
    segment: int
    complex_: bool
    config: Config

    @property
    def count(self) -> int:
        """Segments of time."""
        return -(-self.steps // self.segment)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"T": self.steps, "N": self.states, "segment": self.segment, "count": self.count, "COMPLEX": self.complex_}

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.batch * self.count,)

    def room(self, like: Tensor, *sizes: int) -> Tensor:
        """Uninitialised float32 (batch, *sizes, N, parts)."""
        return like.new_empty((self.batch, *sizes, self.states, 2 if self.complex_ else 1), dtype=torch.float32)


def _call(t: Tensor) -> _Call:
    """From b, h or their cotangents, (B, T, N)."""
    batch, steps, states = t.shape
    if states > LARGEST:
        raise ValueError(f"adjcomp.ops.dense_scan: `b` has {states} states; supported on a GPU: up to {LARGEST}")
    config = choose("dense_scan", t.device, states=states)
    segment = segments(steps, max(1, batch * (states + 1)), INTERVAL, t.device)
    return _Call(batch, steps, states, segment, t.is_complex(), config)


def _ends(call: _Call, A: Tensor, b: Tensor | None, reverse: bool) -> Tensor:
    """Product of matrices (its columns) and end state of every segment, (batch, segments, N + 1, N, parts)."""
    ends = call.room(A, call.count, call.states + 1)
    blocks = -(-(call.states + 1) // call.config.constants["COLUMNS"])
    arguments = {"A": A, "b": b, "ends": ends, "REVERSE": reverse, **strides("A", A), **strides("b", b)}
    launch(kernels.dense_scan_summary, (*call.grid, blocks), {**call.sizes, **arguments}, call.config)
    return ends


def _join(call: _Call, ends: Tensor, first: Tensor | None, entry: Tensor | None, out: Tensor | None, reverse: bool) -> None:
    columns = 1 if first is None else first.shape[1]
    arguments = {"ends": ends, "first": first, "entry": entry, "out": out, "N": call.states, "count": call.count}
    options = {"REVERSE": reverse, "COMPLEX": call.complex_}
    launch(kernels.dense_scan_join, (call.batch, columns), {**arguments, **options}, call.config)


def _entries(call: _Call, A: Tensor, b: Tensor | None, first: Tensor | None, reverse: bool) -> Tensor | None:
    """The state that enters each segment, (batch, segments, N, parts); None for zeros."""
    if call.count == 1 or (b is None and first is None):
        return first
    entry = call.room(A, call.count)
    _join(call, _ends(call, A, b, reverse), None if first is None else first[:, None], entry, None, reverse)
    return entry


def dense_scan(A: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.dense_scan`; A: (B, T, N, N), b: (B, T, N)."""
    if is_wide(A, b, h0):
        return chunked_scan.dense_scan(A, b, h0)
    call = _call(b)
    h = b.new_empty(b.shape, dtype=torch.promote_types(A.dtype, b.dtype))
    last = b.new_empty((b.shape[0], b.shape[2]), dtype=torch.complex64 if b.is_complex() else torch.float32)
    A, b = timed(A), timed(b)
    arguments = {"A": A, "b": b, "entry": _entries(call, A, b, parameter(h0), False), "h": timed(h), "last": parameter(last)}
    launch(kernels.dense_scan_outputs, call.grid, {**call.sizes, **arguments, **strides("A", A), **strides("b", b)}, call.config)
    return h, last


def dense_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, A: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """See `adjcomp.ops.dense_scan`: cotangents of A, b and h0."""
    if is_wide(A, h, h0):
        return chunked_scan.dense_scan_vjp(dh, dh_last, A, h, h0, mask)
    call = _call(h)
    dA = A.new_empty(A.shape) if mask[0] else None
    db = h.new_empty(h.shape) if mask[1] else None
    dh0 = h0.new_empty(h0.shape, dtype=torch.promote_types(h0.dtype, torch.float32)) if mask[2] and h0 is not None else None
    A, h, cotangent = timed(A), timed(h), timed(dh)
    arguments = {
        "dh": cotangent,
        "A": A,
        "h": h,
        "h0": parameter(h0),
        "entry": _entries(call, A, cotangent, parameter(dh_last), True),
        "dA": timed(dA),
        "db": timed(db),
        "dh0": parameter(dh0),
        **strides("dh", cotangent),
        **strides("A", A),
        **strides("h", h),
    }
    launch(kernels.dense_scan_vjp, call.grid, {**call.sizes, **arguments}, call.config)
    return dA, db, dh0 if dh0 is None or h0 is None else dh0.to(h0.dtype)


def dense_scan_summary(A: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a range of time does to any state: h_last = product h0 + end; (B, N, N) and (B, N) in float32 or complex64."""
    if is_wide(A, b):
        return summaries.dense_scan_summary(A, b)
    return _whole(A, b, False)


def dense_scan_adjoint_summary(dh: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """What a range of time does to any adjoint state: dh0 = product dh_last + end; shapes as those of `dense_scan_summary`."""
    if is_wide(dh, A):
        return summaries.dense_scan_adjoint_summary(dh, A)
    return _whole(A, dh, True)


def _whole(A: Tensor, b: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    call = _call(b)
    ends = _ends(call, timed(A), timed(b), reverse)
    identity = torch.zeros_like(call.room(b, call.states))
    identity[..., 0] = torch.eye(call.states, device=b.device)
    columns, end = call.room(b, call.states), call.room(b, 1)
    _join(call, ends, None, None, end, reverse)
    ends[:, :, call.states] = 0
    _join(call, ends, identity, None, columns, reverse)
    wide = (lambda t: torch.view_as_complex(t.contiguous())) if call.complex_ else (lambda t: t[..., 0])
    return wide(columns).mT.contiguous(), wide(end[:, 0])
