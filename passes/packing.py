"""Packed documents: inputs that mark borders inside a row must be read by the model, or its state leaks over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from adjcomp.errors import CaptureError

_BORDERS = ("seq_idx", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k")
_POSITIONS = "position_ids"


def restarts(path: str, tensor: torch.Tensor) -> bool:
    """Whether an input named position_ids, (B, T) or (T,), starts anew inside a row."""
    if not path.endswith(_POSITIONS) or tensor.ndim == 0 or tensor.is_floating_point() or tensor.device.type == "meta":
        return False
    return bool((tensor[..., 1:] <= tensor[..., :-1]).any())


def jumps(path: str, tensor: torch.Tensor) -> bool:
    """Whether an input named position_ids, (B, T) or (T,), has anything but the next number after a number."""
    if not path.endswith(_POSITIONS) or tensor.ndim == 0 or tensor.is_floating_point() or tensor.device.type == "meta":
        return False
    return bool((tensor[..., 1:] != tensor[..., :-1] + 1).any())


def check_attended(paths: Iterable[tuple[str, bool]]) -> None:
    """CaptureError for inputs of a model with attention that make several documents of a row: (path, whether positions jump)."""
    for path, jumping in paths:
        if path.rsplit(".", 1)[-1] in _BORDERS or jumping:
            raise CaptureError(
                f"{path} marks several documents in one row, and attention layers would look from one into another. Pass one "
                "document a row"
            )


def check_packing(unread: Iterable[tuple[str, bool]]) -> None:
    """CaptureError for inputs that mark borders among those the model does not read: (path, whether positions restart) of
    each.
    """
    for path, starts_anew in unread:
        if path.rsplit(".", 1)[-1] in _BORDERS or starts_anew:
            raise CaptureError(
                f"{path} marks several documents in one row, and this model does not read it: its state would leak "
                "from one document into the next. Pass one document a row, or pad"
            )


def refuse_packing(op: str, options: Mapping[str, Any]) -> None:
    """CaptureError where a library's sequence kernel is called with borders inside of a row."""
    for name in _BORDERS:
        if options.get(name) is not None:
            raise CaptureError(
                f"{op} was called with {name}: packed documents would leak into each other. Pass one document a row, or pad."
            )
