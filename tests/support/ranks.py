"""Several ranks in processes of their own, with hard time limits: none of them outlives its test."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

GLOO_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended. result: what its work returned; error: the traceback of what it raised; code: None if it hung."""

    result: Any
    error: str
    code: int | None


def run_ranks(
    count: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120.0, silent: Sequence[int] = ()
) -> list[Ended]:
    """Run `work(rank, *arguments)` on `count` ranks of a Gloo group; what is left after `seconds` is killed.

    work: a function of a module in tests/support. silent: ranks that will not answer; nobody waits for them.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "adjcomp.api", "adjcomp.passes.place", "mesh_work"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    jobs = [
        context.Process(target=_rank, args=(rank, count, store.port, pipes[rank][1], work, arguments)) for rank in range(count)
    ]
    for job in jobs:
        job.start()
    for _, sending in pipes:
        sending.close()
    try:
        return _gather(jobs, [receiving for receiving, _ in pipes], time.monotonic() + seconds, silent)
    finally:
        for job in jobs:
            job.kill()
            job.join()


def _gather(jobs: Sequence[Any], pipes: Sequence[Connection], until: float, silent: Sequence[int]) -> list[Ended]:
    found: dict[int, Ended] = {}
    for rank in sorted(range(len(jobs)), key=lambda rank: rank in silent):
        job, pipe = jobs[rank], pipes[rank]
        until = time.monotonic() if rank in silent else until
        result, error = None, ""
        if pipe.poll(max(0.0, until - time.monotonic())):
            try:
                result, error = pipe.recv()
            except EOFError:
                error = "died"
        job.join(max(0.0, min(2.0, until - time.monotonic())))  # it has told its result; what else it does is cut short
        found[rank] = Ended(result, error, job.exitcode)
    return [found[rank] for rank in range(len(jobs))]


def _rank(rank: int, count: int, port: int, pipe: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=GLOO_SECONDS))
    try:
        pipe.send((work(rank, *arguments), ""))
    except Exception:  # noqa: BLE001 - told to the parent
        pipe.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
    dist.destroy_process_group()
