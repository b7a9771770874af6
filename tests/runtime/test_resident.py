"""Freed memory stays with the process up to the budget, and goes back past it."""

from __future__ import annotations

import pytest

from adjcomp.runtime import resident


class Heap:
    """A libc whose malloc_trim takes the process down to `floor`."""

    def __init__(self, resident_bytes: int, floor: int) -> None:
        self.resident_bytes, self.floor, self.trims = resident_bytes, floor, 0

    def malloc_trim(self, _: int) -> int:
        self.trims += 1
        self.resident_bytes = min(self.resident_bytes, self.floor)
        return 1


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> Heap:
    made = Heap(500 << 20, 400 << 20)
    monkeypatch.setattr(resident, "_libc", lambda: made)
    monkeypatch.setattr(resident, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(resident, "_resident_bytes", lambda: made.resident_bytes)
    monkeypatch.setattr(resident, "_limits", {})
    return made


def test_pages_go_back_only_past_the_budget(heap: Heap) -> None:
    """Given a budget of 100 MiB, when the process grows by less, nothing is trimmed; when it grows by far more, once."""
    guard = resident.ResidentGuard(100 << 20, 0)
    heap.resident_bytes += 100 << 20
    guard.check(0)
    assert heap.trims == 0
    heap.resident_bytes += 20 << 20
    guard.check(0)
    assert (heap.trims, heap.resident_bytes) == (1, 400 << 20)


def test_what_a_step_leaves_does_not_raise_the_next_ones_limit(heap: Heap) -> None:
    """Given freed pages that an earlier step left, then the next one's limit is the earlier one's."""
    limit = resident.ResidentGuard(100 << 20, 0).limit
    heap.resident_bytes += 90 << 20
    assert resident.ResidentGuard(100 << 20, 0).limit == limit


def test_growth_elsewhere_raises_the_limit(heap: Heap) -> None:
    """Given growth that trimming does not undo, then it is tried once and the limit moves."""
    guard = resident.ResidentGuard(100 << 20, 0)
    heap.resident_bytes = heap.floor = 900 << 20
    guard.check(50 << 20)
    guard.check(50 << 20)
    assert heap.trims == 1


class GrowingHeap:
    """A libc whose heap ends where it is told, and that notes what advice it was given."""

    def __init__(self) -> None:
        self.end = 10 << 20
        self.advised: list[tuple[int, int]] = []

    def sbrk(self, _: int) -> int:
        return self.end

    def madvise(self, first: int, size: int, _: int) -> int:
        self.advised.append((first, first + size))
        return 0


def test_large_pages_are_asked_for_where_the_heap_has_grown() -> None:
    """Given a heap that grows, shrinks and grows again, then each growth is asked for once, from the next whole page on."""
    libc = GrowingHeap()
    heap = resident.Heap(libc, 9 << 20)  # type: ignore[arg-type]
    heap.ask_for_large_pages()
    assert libc.advised == []
    for end, first in ((20 << 20, 10 << 20), (12 << 20, None), (17 << 20, 12 << 20)):
        libc.end, libc.advised = end, []
        heap.ask_for_large_pages()
        heap.ask_for_large_pages()
        assert set(libc.advised) == (set() if first is None else {(first, end)})
