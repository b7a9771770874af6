"""Peak memory of straight-line code: storages are counted once, from the instruction that makes them to the last slot that sees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adjcomp.ir.program import Compute, Instruction, Slot
from adjcomp.passes.aliasing import is_alias_target, writes_first_argument


def workspace(
    steps: Sequence[Instruction], inputs: Sequence[Slot], owned: frozenset[Slot], bytes_of: Callable[[Slot], list[int]]
) -> int:
    """Peak of what is live in the program, less the bytes of the owned inputs (they were live before it started)."""
    heap = _Heap()
    for slot in inputs:
        heap.bind(slot, [heap.allocate(size if slot in owned else 0) for size in bytes_of(slot)])
    owned_bytes = peak = heap.live
    for step in steps:
        if isinstance(step, Compute):
            heap.bind(step.result, _storages(heap, step, bytes_of))
        peak = max(peak, heap.live)
        for slot in step.frees:
            heap.release(slot)
    return peak - owned_bytes


def _storages(heap: _Heap, step: Compute, bytes_of: Callable[[Slot], list[int]]) -> list[int]:
    if step.allocates:
        return [heap.allocate(size) for size in bytes_of(step.result)]
    source = heap.slots[step.args[0]]
    if is_alias_target(step.target) or writes_first_argument(step.target):
        return [source[0]] * len(bytes_of(step.result))
    picked = source[step.args[1]] if len(source) > 1 else source[0]
    return [picked]


class _Heap:
    """Reference-counted storages."""

    def __init__(self) -> None:
        self.slots: dict[Slot, list[int]] = {}
        self.sizes: list[int] = []
        self.references: list[int] = []
        self.live = 0

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self.references.append(0)
        self.live += size
        return len(self.sizes) - 1

    def bind(self, slot: Slot, storages: list[int]) -> None:
        self.slots[slot] = storages
        for storage in storages:
            self.references[storage] += 1

    def release(self, slot: Slot) -> None:
        for storage in self.slots.pop(slot):
            self.references[storage] -= 1
            if self.references[storage] == 0:
                self.live -= self.sizes[storage]
