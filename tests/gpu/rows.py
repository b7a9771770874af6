"""What the run on a GPU measures: jobs, rows, and a clock that knows about asynchronous devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table; what was not measured is None."""

    section: str
    name: str
    ok: bool
    seconds: float | None = None
    floor_seconds: float | None = None  # bytes over the device's measured copy rate, or FLOPs over its measured product rate
    other_seconds: float | None = None  # of what it is compared with, which the note names
    peak_bytes: int | None = None
    error: float | None = None  # largest relative error
    note: str = ""

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        seconds = (f"{s * 1e3:.3f} ms" if s is not None else "" for s in (self.seconds, self.floor_seconds, self.other_seconds))
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.0f}"
        note = self.note if self.error is None else f"{self.error:.1e} {self.note}"
        return line(self.section, self.name, "yes" if self.ok else "NO", *seconds, peak, note)


@dataclass(frozen=True)
class Job:
    """A row to be measured."""

    section: str
    name: str
    measure: Callable[[], Row]


def line(*cells: str) -> str:
    widths = (11, 44, 3, 12, 12, 12, 9, 0)
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, rounds: int = 9) -> float:
    """Median seconds of a call after two warm ones."""
    for _ in range(2):
        call()
    found = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - start)
    return sorted(found)[rounds // 2]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that a call had allocated at a time, None where nobody counts."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    wait(device)
    return int(torch.cuda.max_memory_allocated(device))
