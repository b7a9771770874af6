"""Numbers of a graph at one chunk length: every traced size is an expression in the symbol of time."""

from __future__ import annotations

from typing import Any

import torch


def size_at(size: Any, time: Any, length: int) -> int:
    """The integer that a traced size is when time has `length` steps."""
    if isinstance(size, int):
        return size
    return int(size.node.expr.xreplace({time: length}))


def shape_at(value: torch.Tensor, time: Any, length: int) -> tuple[int, ...]:
    """Shape of a fake tensor at a chunk length."""
    return tuple(size_at(size, time, length) for size in value.shape)


def number_of_bytes(value: torch.Tensor, time: Any, length: int) -> int:
    """Bytes of a dense tensor of that shape at a chunk length."""
    count = 1
    for size in shape_at(value, time, length):
        count *= size
    return count * value.dtype.itemsize
