"""For processes with TRITON_INTERPRET=1: the ops run their Triton kernels on CPU tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adjcomp.runtime.kernels import registry

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("import this only where TRITON_INTERPRET=1 was set before Triton was imported")

registry.PACKAGES["cpu"] = registry.PACKAGES["cuda"]
registry.ELSEWHERE.clear()
GUARD = 64  # elements before and behind every tensor that a kernel's wrapper makes


@contextlib.contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `new_empty` is full of NaN and lies between zones of NaN; on leaving, the zones must be untouched."""
    original, made = Tensor.new_empty, []

    def new_empty(self: Tensor, size: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        if device is not None:  # the interpreter's own
            return original(self, size, dtype=dtype, device=device)
        shape = tuple(size)
        count = int(torch.Size(shape).numel())
        buffer = original(self, (count + 2 * GUARD,), dtype=self.dtype if dtype is None else dtype)
        buffer.fill_(torch.nan)
        made.append(buffer)
        return buffer[GUARD : GUARD + count].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    yield
    monkeypatch.undo()
    assert made
    for buffer in made:
        assert bool(buffer[:GUARD].isnan().all())
        assert bool(buffer[-GUARD:].isnan().all())
