"""Numbers of a graph at one chunk length: every traced size is an expression in the symbol of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adjcomp.ir.program import Slot


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


@dataclass(frozen=True)
class Target:
    """At which chunk length, and over which symbol, a graph is lowered."""

    time: Any
    length: int


@dataclass(frozen=True)
class SlotSizes:
    """Fake values of slots at the target's length."""

    values: list[Any]
    at: Target

    def bytes_of(self, slot: Slot) -> list[int]:
        """Bytes of each tensor in a slot; 0 for a result that does not exist."""
        value = self.values[slot.number]
        tensors = [value] if isinstance(value, torch.Tensor) else value
        return [0 if v is None else number_of_bytes(v, self.at.time, self.at.length) for v in tensors]

    def shapes_of(self, slot: Slot) -> list[tuple[int, ...]]:
        """Shape of each tensor in a slot; () for a result that does not exist."""
        value = self.values[slot.number]
        tensors = [value] if isinstance(value, torch.Tensor) else value
        return [() if v is None else shape_at(v, self.at.time, self.at.length) for v in tensors]
