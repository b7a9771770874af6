"""The order in which CUDA graphs are captured and replayed: parts of torch.cuda are replaced by ones that note what is asked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from adjcomp.runtime import cuda_graphs
from adjcomp.runtime.cuda_graphs import CudaRecorder
from adjcomp.runtime.recording import RecordingError

Log = list[tuple[Any, ...]]


class Stream:
    """Notes which stream it waits for."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found: Log = []
    pools = iter(range(10))

    class Graph:
        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            found.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            found.append(("end",))

        def replay(self) -> None:
            found.append(("replay",))

    main = Stream(found, "main")
    fakes = {
        "Stream": lambda device: Stream(found, "aside"),
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: next(pools),
        "current_stream": lambda device: main,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_graphs, "_wake_libraries", lambda device: found.append(("wake",)))
    monkeypatch.setattr(cuda_graphs, "_at_its_address", lambda result: result)
    return found


def test_each_pool_has_a_graph_of_its_own_that_stays(log: Log) -> None:
    """Given two recordings and a new start, then an anchor is captured before the first and after the start, in its own pool."""
    recorder = CudaRecorder(torch.device("cpu"))
    one, two = torch.ones(1), torch.zeros(2)
    first = recorder.record(lambda: [one, None, one])
    assert log == [
        ("aside", "waits for", "main"),
        ("wake",),
        ("begin", 0, "thread_local"),
        ("end",),
        ("begin", 0, "thread_local"),
        ("end",),
        ("main", "waits for", "aside"),
    ]
    assert [id(r) for r in first.replay()] == [id(one), id(None), id(one)]
    assert log.pop() == ("replay",)
    recorder.record(lambda: [two])
    recorder.start_over()
    recorder.record(lambda: [two])
    assert [entry[1] for entry in log if entry[0] == "begin"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), RecordingError),
        (torch.OutOfMemoryError("no"), torch.OutOfMemoryError),
        (KeyError("x"), KeyError),
    ],
)
def test_a_capture_that_fails_ends(raised: Exception, expected: type[Exception], log: Log) -> None:
    """Given a program that raises while it is captured, then the capture ends, and only what can't be recorded is told apart."""

    def run() -> list[torch.Tensor | None]:
        raise raised

    with pytest.raises(expected):
        CudaRecorder(torch.device("cpu")).record(run)
    assert log[-1] == ("end",)


def test_a_replay_on_another_stream_waits_for_the_last(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    recorder.prepare()
    recorder.prepare()
    assert log == []
    other = Stream(log, "other")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    recorder.prepare()
    assert log == [("other", "waits for", "main")]
