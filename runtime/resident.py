"""Keep the process as small as what is live: hand free pages inside the heap back to the system.

On a CPU, tensors of very different lifetimes share malloc's heap, and the holes between them can grow to the size of the budget.
glibc gives whole free pages back on request; asking only when the process has grown well past what is live costs almost nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

SLACK_BYTES = 8 << 20
SLACK_SHARE = 0.02  # of the budget
_STATM = "/proc/self/statm"


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None on other systems."""
    if not os.path.exists(_STATM):
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


def _resident_bytes() -> int:
    with open(_STATM, "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ResidentGuard:
    """Watches one step: `check` trims when what the process has grown by passes the budget and a slack."""

    def __init__(self, budget_bytes: int, live_bytes: int) -> None:
        self.trim = _trim()
        self.limit = 0
        if self.trim is not None:
            slack = SLACK_BYTES + int(SLACK_SHARE * budget_bytes)
            self.limit = _resident_bytes() - live_bytes + budget_bytes + slack

    def check(self) -> None:
        """Called between actions."""
        if self.trim is not None and _resident_bytes() > self.limit:
            self.trim(0)
