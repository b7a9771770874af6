"""Plans have a million small objects and no cycles: looking for cycles among them takes longer than making them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without runs of the cyclic garbage collector, where it was on; what no cycle holds is freed as ever."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
