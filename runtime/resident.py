"""Keep the process as small as what is live, and no smaller: freed pages stay for the next action, up to the budget.

On a CPU, tensors of very different lifetimes share malloc's heap. Left alone, glibc gives freed memory at the heap's end back to
the system and asks for it anew in the next step: faults of fresh pages then take up to a tenth of a step. And holes between
tensors can grow to the size of the budget. So glibc is told to keep what is freed, and to hand whole free pages back when the
process has grown well past what is live, which is looked at between actions.

What the heap grows by is asked for in large pages of 2 MiB: kernels that walk several tensors side by side otherwise wait for
page tables, up to a quarter of a scan.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

SLACK_BYTES = 8 << 20
SLACK_SHARE = 0.02  # of the budget
_STATM = "/proc/self/statm"
_TUNED_BY = ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # who sets these has decided about freed memory
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of mman.h
_MOST = 2**31 - 1
_LARGEST_ON_HEAP = 32 << 20  # what glibc itself grows its threshold to
_GROWTH = 64 << 20  # of the heap at a time: addresses, not memory
_LARGE_PAGE = 2 << 20

_limits: dict[int, int] = {}  # by budget: the resident size at which free pages go back


@cache
def _libc() -> ctypes.CDLL | None:
    """glibc; None on other systems."""
    if not os.path.exists(_STATM):
        return None
    try:
        libc = ctypes.CDLL(None)
    except OSError:
        return None
    return libc if "CS_GNU_LIBC_VERSION" in os.confstr_names else None


@cache
def keep_freed_memory() -> None:
    """Tell glibc once to keep what is freed, unless the user has told it otherwise."""
    libc = _libc()
    if libc is not None and not any(name in os.environ for name in _TUNED_BY):
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        libc.mallopt(_M_TOP_PAD, _GROWTH)
        libc.sbrk.restype = ctypes.c_void_p
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        heap = Heap(libc, 0)
        heap.asked = heap.end()
        _heaps.append(heap)


@dataclass
class Heap:
    """malloc's heap, and the address up to which large pages have been asked for; what lay below at first is left."""

    libc: ctypes.CDLL
    asked: int

    def end(self) -> int:
        return int(self.libc.sbrk(0))

    def ask_for_large_pages(self) -> None:
        """Where the heap has grown since the last call: pages to come are large; those that have come are made so."""
        end = self.end()
        if end - self.asked >= _LARGE_PAGE:
            first = -(-self.asked // _LARGE_PAGE) * _LARGE_PAGE
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):  # systems without large pages refuse, and nothing changes
                self.libc.madvise(first, end - first, advice)
            self.asked = end
        self.asked = min(self.asked, end)


_heaps: list[Heap] = []  # none before `keep_freed_memory`, or where the user has decided


def ask_for_large_pages() -> None:
    """Called between kernels; a comparison where the heap has not grown."""
    for heap in _heaps:
        heap.ask_for_large_pages()


@cache
def _statm(process: int) -> int:
    """A descriptor that stays open: opening the file takes several times as long as reading it."""
    return os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)


@cache
def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    return int(os.pread(_statm(os.getpid()), 128, 0).split(maxsplit=2)[1]) * _page_bytes()


class ResidentGuard:
    """Watches one step: `check` trims when what the process holds beside its own passes the budget and a slack."""

    def __init__(self, budget_bytes: int, live_bytes: int) -> None:
        self.libc = _libc()
        self.budget_bytes = budget_bytes
        self.limit = 0
        if self.libc is not None:
            keep_freed_memory()
            # The least of all steps: what an earlier one freed and left must not count as the process's own.
            self.limit = _limits[budget_bytes] = min(self._limit(live_bytes), _limits.get(budget_bytes, 2**63))

    def _limit(self, live_bytes: int) -> int:
        slack = SLACK_BYTES + int(SLACK_SHARE * self.budget_bytes)
        return _resident_bytes() - live_bytes + self.budget_bytes + slack

    def check(self, live_bytes: int) -> None:
        """Called between actions, with what is live."""
        ask_for_large_pages()
        if self.libc is None or _resident_bytes() <= self.limit:
            return
        self.libc.malloc_trim(0)
        if _resident_bytes() > self.limit:  # something else in the process has grown
            self.limit = _limits[self.budget_bytes] = self._limit(live_bytes)
