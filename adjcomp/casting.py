"""Autocast around a compiled call: the trace has written its casts out, so that nothing is cast a second time while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def recorded_casts() -> Iterator[None]:
    """Autocast off for everything inside, on every device.

    Else a product that a model keeps in float32 (the angles of rotary positions, say) would be cast all the same, and so would
    be what an operation of ours computes inside.
    """
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
