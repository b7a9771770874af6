"""Bytes that Triton kernels move, counted in the interpreter (import `interpreted` first).

A program's own rereads come from its registers or L1, so an address counts once a program. Arguments that are small beside the
largest one (parameters, states, sums of programs) are shared through L2 and count once a launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter

UNIT = 2  # bytes; no number is smaller
LARGE = 0.4  # of the bytes of the largest argument, from where on one is a stream


@dataclass(frozen=True)
class Traffic:
    """Of all launches of a kernel: bytes of streams, each once; the same once a program; and of everything else.

    `arguments` has the bytes of each argument that were met in any launch, each once a launch.
    """

    least: int = 0
    streams: int = 0
    rest: int = 0
    arguments: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """What is moved over the least that streams need: all else is overhead."""
        return (self.streams + self.rest) / self.least


@dataclass
class _Launch:
    """The byte ranges of one launch's arguments and streams, and what it met, in units of 2 bytes by their addresses."""

    named: Mapping[str, tuple[int, int]]
    spans: list[tuple[int, int]]
    program: list[Any] = field(default_factory=list)  # of the running program
    streams: list[Any] = field(default_factory=list)  # of all programs; each program's own once
    rest: list[Any] = field(default_factory=list)

    def note(self, addresses: Any, size: int) -> None:
        self.program.append((addresses.astype(np.int64)[:, None] + np.arange(0, size, UNIT)).ravel())

    def next_program(self) -> None:
        if self.program:
            met = np.unique(np.concatenate(self.program))
            inside = np.zeros(met.shape, dtype=bool)
            for start, stop in self.spans:
                inside |= (start <= met) & (met < stop)
            self.streams.append(met[inside])
            self.rest.append(met[~inside])
            self.program.clear()

    def traffic(self) -> tuple[int, int, int]:
        """Bytes of streams, of streams by program, and of all else."""
        streams, rest = np.concatenate(self.streams), np.concatenate(self.rest)
        return UNIT * np.unique(streams).size, UNIT * streams.size, UNIT * np.unique(rest).size

    def by_argument(self) -> dict[str, int]:
        met = np.unique(np.concatenate([*self.streams, *self.rest]))
        return {name: UNIT * int(((start <= met) & (met < stop)).sum()) for name, (start, stop) in self.named.items()}


def _launched(arguments: Mapping[str, Any]) -> _Launch:
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
    named = {name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for name, t in tensors.items()}
    largest = max(stop - start for start, stop in named.values())
    return _Launch(named, [(start, stop) for start, stop in named.values() if stop - start >= LARGE * largest])


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Traffic]]:
    """By kernel, what the launches inside moved."""
    found: dict[str, Traffic] = {}
    builder, run = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    load, store, place = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
    current: list[_Launch] = []

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _note(current, ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(current, ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def set_grid_idx(self: Any, *index: int) -> None:
        current[-1].next_program()
        place(self, *index)

    def call(self: Any, *args: Any, **arguments: Any) -> None:
        current.append(_launched(arguments))
        run(self, *args, **arguments)
        launch = current.pop()
        launch.next_program()
        before = found.get(self.fn.__name__, Traffic())
        least, streams, rest = launch.traffic()
        named = {name: size + before.arguments.get(name, 0) for name, size in launch.by_argument().items()}
        found[self.fn.__name__] = Traffic(before.least + least, before.streams + streams, before.rest + rest, named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", masked_load)
        patch.setattr(builder, "create_masked_store", masked_store)
        patch.setattr(builder, "set_grid_idx", set_grid_idx)
        patch.setattr(interpreter.GridExecutor, "__call__", call)
        yield found


def _note(current: list[_Launch], ptrs: Any, mask: Any) -> None:
    addresses = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
    chosen = addresses[np.broadcast_to(mask.data.astype(bool), addresses.shape)]
    current[-1].note(chosen, ptrs.get_element_ty().primitive_bitwidth // 8)
