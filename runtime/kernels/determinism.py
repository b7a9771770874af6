"""Whether kernels must run in their fixed configurations, so that equal runs give equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_asked: ContextVar[bool] = ContextVar("fixed kernels", default=False)


def is_fixed() -> bool:
    """Asked for by `fixed_kernels` around this call, or by `torch.use_deterministic_algorithms(True)`."""
    return _asked.get() or torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def fixed_kernels(asked: bool) -> Iterator[None]:
    """Inside, kernels launched from this thread take the configurations that hold for any device, if `asked`."""
    token = _asked.set(asked or _asked.get())
    try:
        yield
    finally:
        _asked.reset(token)
