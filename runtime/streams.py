"""The streams of a device, for actions that run side by side.

On an accelerator a side stream waits for everything before the Fork, and the main stream waits for it at the Join. What was live
at the Fork is held until the Join, so that no stream's memory is handed to another that is ahead of it. On a CPU actions run in
the plan's order, which is one of those that a Fork allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from adjcomp.ir.values import Value
from adjcomp.runtime.values import Held


class Streams(Protocol):
    """What the executor asks of a device's streams."""

    def fork(self, live: Mapping[Value, Held]) -> None:
        """Side streams may start; `live` is what they may read."""

    def on(self, stream: int) -> AbstractContextManager[None]:
        """The work inside is issued to `stream`; 0 is the one that was current at the Fork."""

    def join(self) -> None:
        """The main stream waits for all others."""


class OneStream:
    """For devices on which work runs in the order in which it is issued."""

    def fork(self, live: Mapping[Value, Held]) -> None:
        """Nothing to prepare."""

    def on(self, stream: int) -> AbstractContextManager[None]:
        """The same place for all."""
        return nullcontext()

    def join(self) -> None:
        """Nothing to wait for."""


class CudaStreams:
    """For CUDA and HIP devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: dict[int, torch.cuda.Stream] = {}
        self._waiting: set[int] = set()  # side streams that have work of this stretch
        self._forked: torch.cuda.Event | None = None
        self._held: list[Held] = []

    def fork(self, live: Mapping[Value, Held]) -> None:
        """Mark where the side streams start, and hold what they may read."""
        self._forked = torch.cuda.current_stream(self._device).record_event()
        self._held = [list(held) for held in live.values()]

    def on(self, stream: int) -> AbstractContextManager[None]:
        """The side stream, once it waits for the Fork."""
        if stream == 0 or self._forked is None:
            return nullcontext()
        side = self._side.get(stream)
        if side is None:
            side = self._side[stream] = torch.cuda.Stream(self._device)
        if stream not in self._waiting:
            side.wait_event(self._forked)
            self._waiting.add(stream)
        return torch.cuda.stream(side)

    def join(self) -> None:
        """Wait on the device, not on the host."""
        main = torch.cuda.current_stream(self._device)
        for stream in sorted(self._waiting):
            main.wait_stream(self._side[stream])
        self._waiting.clear()
        self._held.clear()
        self._forked = None


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else OneStream()
