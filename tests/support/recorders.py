"""A recorder for a CPU: what a CUDA graph does to memory, without one.

A recording notes a function with the very tensors that it was given, and runs it again on each replay: so it reads stale
parameters and adds to dead accumulators where a real graph would. Its results are the same tensors every time, and they hold NaN
as soon as another recording is about to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from adjcomp.runtime import cuda_graphs
from adjcomp.runtime.recording import Recorder, Recording, RecordingError, Results


class Repeated(Recording):
    """Runs its function again, with the results in the same places."""

    def __init__(self, owner: RepeatingRecorder, run: Callable[[], Results]) -> None:
        self.owner = owner
        self.run = run
        self.results: Results | None = None

    def replay(self) -> Results:
        made = self.run()
        if self.results is None:
            self.results = made
        for place, result in zip(self.results, made, strict=True):
            if place is not None and result is not None:
                place.copy_(result)
        self.owner.last = self.results
        return self.results


class RepeatingRecorder(Recorder):
    """Counts recordings; refuses all where `refuses` is set."""

    made = 0
    refuses = False

    def __init__(self, device: torch.device) -> None:
        self.last: Results = []

    def start_over(self) -> None:
        self.last = []

    def prepare(self) -> None:
        for result in self.last:
            if result is not None and result.is_floating_point():
                result.fill_(torch.nan)

    def record(self, run: Callable[[], Results]) -> Recording:
        if type(self).refuses:
            raise RecordingError("nothing is recorded here")
        type(self).made += 1
        return Repeated(self, run)


@contextmanager
def recording_on_cpu(refuses: bool = False) -> Iterator[type[RepeatingRecorder]]:
    """Let tiles on a CPU be recorded; gives a class that counts the recordings."""

    class Counting(RepeatingRecorder):
        pass

    Counting.refuses = refuses
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cuda_graphs.RECORDERS, "cpu", Counting)
        yield Counting
