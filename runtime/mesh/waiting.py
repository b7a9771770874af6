"""Waiting for transfers on threads of their own, so that the caller can look out for failed ranks meanwhile.

A wait in Gloo can't be asked whether it is done, and one that runs out of time closes every connection of its group: so each
direction of each peer has a thread that waits without a limit, and the caller waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from adjcomp.errors import RankError
from adjcomp.runtime.mesh.watch import LOOK_SECONDS, NOBODY, Watch

LEAVING_SECONDS = 1.0  # for a transfer that is about to end; one whose peer hangs is left behind
LONG = timedelta(days=1)  # the caller's patience ends a wait, not the transport's


@dataclass
class Ticket:
    """A transfer or a meeting under way. works: on an accelerator, what the stream that needs it still has to wait for."""

    waits: str  # as `Watch.waiting` takes it
    members: Sequence[int]  # global ranks that take part
    what: str  # "x[3,7] from rank 1"
    done: threading.Event = field(default_factory=threading.Event)
    error: RuntimeError | None = None
    works: list[Any] = field(default_factory=list)


def done_ticket(what: str) -> Ticket:
    """A ticket for something that needs nobody else."""
    ticket = Ticket(NOBODY, (), what)
    ticket.done.set()
    return ticket


class Waiter:
    """A thread that waits for works in the order they are given.

    A work holds the tensors that it moves: it is let go of before anybody hears that it is done, so that they are gone when the
    plan says so.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[list[Any], Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, works: list[Any], ticket: Ticket) -> None:
        """Mark `ticket` as done when all `works` are, which this takes over."""
        self._jobs.put((works, ticket))

    def close(self) -> None:
        """End the thread after what it has, and see it off: an interpreter that ends under it aborts the process."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(LEAVING_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            works, ticket = job
            try:
                while works:
                    works.pop(0).wait(LONG)
            except RuntimeError as error:
                works.clear()
                ticket.error = error
            ticket.done.set()
            del job, works, ticket


def wait_for(ticket: Ticket, watch: Watch) -> None:
    """Wait until a ticket is done. RankError as soon as a rank is known to have failed."""
    if not ticket.done.is_set():
        watch.waiting(ticket.waits, ticket.members, ticket.what)
        try:
            while not ticket.done.wait(LOOK_SECONDS):
                watch.check()
        finally:
            watch.arrived()
    if ticket.error is not None:
        raise broken(ticket, watch, ticket.error) from ticket.error
    while ticket.works:
        ticket.works.pop(0).wait()


def broken(ticket: Ticket, watch: Watch, error: RuntimeError) -> RankError:
    """The error behind a transfer that broke off."""
    others = [rank for rank in ticket.members if rank != watch.own]
    return watch.explain(others, f"rank {others[0]} is gone: {ticket.what} broke off ({str(error)[:200]})")
