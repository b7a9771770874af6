"""Recordings as CUDA graphs (HIP graphs on AMD).

All graphs of a device are captured on one stream of their own and take memory from one pool; replays run on the caller's stream,
one after the other. What a graph leaves is read through its address: holding the tensors themselves would keep each graph's
results apart, where now the next capture uses the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adjcomp.runtime.recording import Recorder, Recording, RecordingError, Results

Tensor = torch.Tensor
ERROR_MODE = "thread_local"  # other threads may be talking to other ranks
LIBRARY_BYTES = 2 * (32 << 20)  # cuBLAS's workspace on Hopper, the largest; one for the thread of each pass


@dataclass(frozen=True)
class _Graph(Recording):
    graph: torch.cuda.CUDAGraph
    results: Results

    def replay(self) -> Results:
        self.graph.replay()
        return self.results


class CudaRecorder(Recorder):
    """Captures on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None
        self.anchor: torch.cuda.CUDAGraph | None = None
        self.last: torch.cuda.Stream | None = None

    def start_over(self) -> None:
        self.pool = self.anchor = None

    def prepare(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)
        self.last = current

    def record(self, run: Callable[[], Results]) -> Recording:
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            _wake_libraries(self.device)
            if self.anchor is None:  # a pool without any graph can't be captured into again
                self.pool, self.anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
                self.anchor.capture_begin(pool=self.pool, capture_error_mode=ERROR_MODE)
                torch.zeros(1, device=self.device)
                self.anchor.capture_end()
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode=ERROR_MODE)
                try:
                    results = run()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise RecordingError(str(error)) from error
        caller.wait_stream(self.stream)
        known = {id(result): _at_its_address(result) for result in results if result is not None}
        return _Graph(graph, [None if result is None else known[id(result)] for result in results])


def _wake_libraries(device: torch.device) -> None:
    """A product makes cuBLAS allocate its workspace for this thread and stream: outside of the pool, which may go before it."""
    small = torch.zeros(16, 16, device=device)
    torch.mm(small, small)


@dataclass(frozen=True)
class _Memory:
    """Bytes at an address, which `torch.as_tensor` reads without taking them over."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _at_its_address(result: Tensor) -> Tensor:
    """The same tensor without its storage: the pool keeps the memory as long as there is a graph."""
    if result.numel() == 0:
        return torch.empty_like(result)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True))
    found: Tensor = torch.as_tensor(_Memory(result.data_ptr(), reach * result.element_size()), device=result.device)
    return found.view(result.dtype).as_strided(result.shape, result.stride())


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


def can_record(device: torch.device) -> bool:
    """Whether tiles on a device can be recorded."""
    return device.type in RECORDERS


def recorder_for(device: torch.device) -> Recorder:
    """How a device records. KeyError where it can't."""
    return RECORDERS[device.type](device)
