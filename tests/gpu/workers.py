"""Rows measured in processes of their own: a kernel that breaks its device or hangs costs one row, and many compile at once."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import correctness  # noqa: E402 - found beside this file and in tests/support
import speed  # noqa: E402
import steps  # noqa: E402
from rows import Job, Row, wait  # noqa: E402

STARTING = 60.0  # seconds that a process may take to start, beside its row's
LEAVING = 3.0  # seconds that an idle one may take to end
SECTIONS = (
    steps.first_calls,
    speed.first_calls,
    correctness.jobs,
    speed.jobs,
    speed.graph_jobs,
    steps.graph_jobs,
    steps.jobs,
)


def jobs(device: torch.device, tiny: bool) -> list[Job]:
    """Every row that is to be measured, in order; a process finds a row again by its place."""
    return [job for section in SECTIONS for job in section(device, tiny)]


def failure(job: Job, note: str) -> Row:
    """The row of a job that came to nothing."""
    return Row(job.section, job.name, ok=False, note=note)


def measured(job: Job, device: torch.device) -> tuple[Row, bool]:
    """One row or its failure, and whether the device still works afterwards."""
    torch.manual_seed(0)
    try:
        row = job.measure()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a row is its result, and the next row runs
        row = failure(job, f"{type(error).__name__}: {str(error)[:300]}")
    try:
        wait(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:
        return row, False
    return row, True


def serve(connection: Connection, device: str, tiny: bool) -> None:
    """The process: rows by their places, until the other side hangs up or the device is broken."""
    place = torch.device(device)
    known, healthy = jobs(place, tiny), True
    while healthy:
        try:
            index = connection.recv()
        except EOFError:
            return
        row, healthy = measured(known[index], place)
        connection.send((row, healthy))


class Worker:
    """A process that measures one row after the other; where it breaks or takes too long, the next row gets a new one."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection | None = None

    def row(self, index: int, job: Job, seconds: float) -> Row:
        """Measure a row, in `seconds` at most."""
        limit, connection = seconds, self.connection
        if connection is None:
            connection, limit = self._start(), seconds + STARTING
        try:
            connection.send(index)
            if not connection.poll(limit):
                self.close()
                return failure(job, f"stopped after {limit:.0f} s")
            row, healthy = connection.recv()
        except (EOFError, ConnectionError):
            self.close()
            return failure(job, "its process died")
        if not healthy:
            self.close()
        return row

    def close(self) -> None:
        """End the process and give its memory back: it goes by itself when it is told, or is killed where it is busy."""
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.join(LEAVING)
            self.process.kill()
            self.process.join()
        self.process = self.connection = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(self.device), self.tiny), daemon=True)
        self.process.start()
        theirs.close()
        self.connection = ours
        return ours


class Clock:
    """How much time is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()


def side_by_side(
    wanted: Sequence[tuple[int, Job]], make: Callable[[], Worker], count: int, clock: Clock, most: float
) -> Iterator[Row]:
    """Rows in which no time is measured, by `count` processes at once, each row in `most` seconds."""
    workers = [make() for _ in range(count)]
    idle = list(workers)

    def one(item: tuple[int, Job]) -> Row:
        if clock.left <= 0:
            return left_out(item[1])
        worker = idle.pop()  # as many threads as workers: one is always idle
        try:
            return worker.row(*item, min(most, clock.left))
        finally:
            idle.append(worker)

    try:
        with ThreadPoolExecutor(count) as threads:
            yield from threads.map(one, wanted)
    finally:
        for worker in workers:
            worker.close()


def one_by_one(wanted: Sequence[tuple[int, Job]], make: Callable[[], Worker], clock: Clock) -> Iterator[Row]:
    """Rows that have the device for themselves."""
    worker = make()
    try:
        for index, job in wanted:
            yield left_out(job) if clock.left <= 0 else worker.row(index, job, clock.left)
    finally:
        worker.close()


def left_out(job: Job) -> Row:
    """The row of a job that there was no time for."""
    return Row(job.section, job.name, ok=True, note="left out: no time")
