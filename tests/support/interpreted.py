"""For processes with TRITON_INTERPRET=1: the ops run their Triton kernels on CPU tensors.

The interpreter cuts float32 off to bfloat16, where GPUs round to the nearest (`cvt.rn` in what Triton compiles). Here it
rounds, so that errors can be compared with those of torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from adjcomp.runtime.kernels import registry

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("import this only where TRITON_INTERPRET=1 was set before Triton was imported")

registry.PACKAGES["cpu"] = registry.PACKAGES["cuda"]
registry.ELSEWHERE.clear()
_convert_float = interpreter._convert_float


def _convert_rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter's conversion of arrays, with float32 rounded to the nearest bfloat16, ties to even."""
    if source != tl.float32 or target != tl.bfloat16:
        return _convert_float(data, source, target, mode)
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


interpreter._convert_float = _convert_rounding

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
