"""Which ranks are alive and moving, and which one failed first.

Every rank keeps a line in the process group's store: a heartbeat, how far it is, and what it waits for. A thread renews it and
reads the lines of two neighbours in a ring, and, while this rank waits, the lines of those it waits for. Whoever notices a
failure writes it down once, under a key that all ranks read: so everyone raises the same error, and it names the rank where the
trouble began rather than the neighbour that was heard of last.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from adjcomp.errors import RankError
from adjcomp.runtime.mesh.meeting import Meeting

LONGEST_INTERVAL = 1.0  # seconds between heartbeats
LONGEST_SILENCE = 60.0  # seconds without a heartbeat after which a rank counts as dead or stopped
LOOK_SECONDS = 0.05  # between two looks of a waiting main thread
EVERYONE = "*"
NOBODY = "-"
LEFT = "!"


@dataclass(frozen=True)
class Line:
    """What a rank says of itself. waits: NOBODY, a rank's number, EVERYONE and the name of a group, or LEFT and why."""

    beat: int
    position: int
    meetings: dict[str, int]  # group -> how many of its meetings the rank has come to
    waits: str
    busy: bool  # in long work without actions, which may keep the interpreter to itself for a while

    def text(self) -> str:
        """As it stands in the store."""
        return json.dumps([self.beat, self.position, self.meetings, self.waits, self.busy])


@dataclass
class _Seen:
    """The last news of a rank, and for how many rounds there has been none."""

    line: Line
    rounds: int = 0


@dataclass
class _Wait:
    """What this rank waits for, and for how many rounds the rank at the end of the chain hasn't moved.

    Time is counted in rounds of the watching thread, not by the clock: a process that was suspended must not think that everyone
    else was silent meanwhile.
    """

    waits: str
    members: Sequence[int]
    what: str
    rounds: int = 0
    sign: tuple[object, ...] = ()


@dataclass
class _State:
    """What the main thread says and the watching thread reads; every field is replaced as a whole."""

    position: int = 0
    meetings: dict[str, int] = field(default_factory=dict)
    wait: _Wait | None = None
    busy: bool = False


class Watch:
    """One rank's eye on the others.

    Args:
        store: the Store of the process group; a connection of its own is opened.
        ranks: global ranks that work together. own: this one.
        timeout_seconds: how long a rank may stand still while another waits for it.
        name: the same on all ranks, unlike that of any other watch.
    """

    def __init__(self, store: Any, ranks: Sequence[int], own: int, timeout_seconds: float, name: str) -> None:
        self.ranks, self.own, self.timeout = tuple(ranks), own, timeout_seconds
        self.interval = max(min(LONGEST_INTERVAL, timeout_seconds / 20), len(self.ranks) / 100)
        self.silence = max(min(LONGEST_SILENCE, 0.75 * timeout_seconds), 4 * self.interval)
        named = dist.PrefixStore(f"adjcomp/{name}", store.clone())  # type: ignore[attr-defined]
        meeting = Meeting(named, self.ranks, own, timeout_seconds)
        self._store = meeting.fresh
        self._state = _State()
        self._beat = 0
        self._seen: dict[int, _Seen] = {}
        self._fault: RankError | None = None
        self._looks = 0  # of the waiting main thread since the store answered last
        self._stop = threading.Event()
        self._write()
        meeting.complete()
        self._thread = threading.Thread(target=self._watch, name="adjcomp-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; a rank that others still need is missed from now on, with the reason if an exception ended it."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(self.silence)
        ended = getattr(sys, "last_value", None)
        reason = "has left" if ended is None else f"has left after {type(ended).__name__}: {ended}"
        if self._fault is None and not self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the store may have gone before us: then nobody reads this any more
                line = Line(self._beat + 1, self._state.position, {}, f"{LEFT}{reason}", False)
                self._store.set(str(self.own), line.text())

    # What the main thread says ------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Another action is done."""
        self._state.position += 1

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Long work without actions (capturing, planning): others see this rank as moving while it lasts."""
        self._state.busy = True
        try:
            yield
        finally:
            self._state.busy = False

    def come(self, group: str) -> None:
        """This rank has come to the next meeting of a group."""
        self._state.meetings = {**self._state.meetings, group: self._state.meetings.get(group, 0) + 1}

    def waiting(self, waits: str, members: Sequence[int], what: str) -> None:
        """This rank begins to wait."""
        self._state.wait = _Wait(waits, members, what)

    def arrived(self) -> None:
        """It waits no longer."""
        self._state.wait = None

    def check(self) -> None:
        """RankError if a rank has failed, also if this one has."""
        if self._fault is not None:
            raise RankError(self._fault.rank, str(self._fault))
        self._looks += 1
        if self._looks * LOOK_SECONDS > self.silence + self.interval and self._state.wait is not None:
            text = f"the store of the process group, kept by rank 0 or its launcher, has not answered for {self.silence:g} s"
            self._fault = RankError(0, text)
            raise self._fault

    def fail(self, rank: int, text: str) -> RankError:
        """Tell everyone that `rank` has failed; the error that was told first."""
        if self._fault is None:
            self._fault = RankError(rank, text)
            try:
                first = self._store.compare_set("fault", "", json.dumps([rank, text]))
                self._fault = _fault(first)
            except RuntimeError as error:
                self._fault = RankError(rank, f"{text} (and the store doesn't answer: {error})")
        return self._fault

    def explain(self, peers: Sequence[int], text: str) -> RankError:
        """The error behind a broken transfer with `peers`: what is known of it by now or soon, else `text`."""
        patience = min(2 * self.interval, 2.0)
        if len(peers) > 1:  # which of them it was is known when it has been silent for long enough
            patience = max(self.silence + 3 * self.interval, min(1.5 * self.silence, self.timeout))
        until = time.monotonic() + patience
        self.waiting(NOBODY, peers, text)  # the watching thread takes silence for a failure only while somebody waits
        while self._fault is None and time.monotonic() < until and not self._stop.is_set():
            time.sleep(self.interval / 10)
        self.arrived()
        if self._fault is not None:
            return self._fault
        return self.fail(peers[0], text)

    # The watching thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._round()
            except RuntimeError as error:
                if not self._stop.is_set() and self._fault is None:
                    self._fault = RankError(
                        0, f"the store of the process group, kept by rank 0 or its launcher, is gone: {error}"
                    )
                return

    def _round(self) -> None:
        """Say what this rank does, hear of others."""
        self._write()
        if self._store.check(["fault"]) and self._fault is None:
            self._fault = _fault(self._store.get("fault"))
        self._looks = 0
        if self._fault is not None:
            return
        place = self.ranks.index(self.own)
        for rank in {self.ranks[place - 1], self.ranks[(place + 1) % len(self.ranks)]} - {self.own}:
            self._hear(rank)
        wait = self._state.wait
        if wait is not None:
            self._follow(wait)

    def _write(self) -> None:
        self._beat += 1
        if self._state.busy:
            self._state.position += 1
        wait = self._state.wait
        waits = NOBODY if wait is None else wait.waits
        line = Line(self._beat, self._state.position, self._state.meetings, waits, self._state.busy)
        self._store.set(str(self.own), line.text())

    def _hear(self, rank: int) -> Line:
        """The line of a rank; a fault if it is silent for too long."""
        line = Line(*json.loads(self._store.get(str(rank))))
        seen = self._seen.get(rank)
        if seen is None or seen.line.beat != line.beat:
            self._seen[rank] = _Seen(line)
            return line
        seen.rounds += 1
        limit = max(self.silence, self.timeout) if line.busy else self.silence
        silent = seen.rounds * self.interval > limit and not line.waits.startswith(LEFT)
        if silent and self._state.wait is not None:
            self.fail(rank, f"rank {rank} is dead or stopped: no sign of life for {limit:g} s")
        return line

    def _follow(self, wait: _Wait) -> None:
        """From what this rank waits for to the rank that holds everyone up; a fault if that one stands still."""
        line, rank, waits, members = None, self.own, wait.waits, wait.members
        visited = {self.own}
        while waits != NOBODY and not waits.startswith(LEFT):
            rank = self._late(waits, members) if waits.startswith(EVERYONE) else int(waits)
            if rank in visited:
                break
            visited.add(rank)
            line = self._hear(rank)
            waits, members = line.waits, self.ranks
        if line is None or rank == self.own:
            return
        sign = (rank, line.position, tuple(sorted(line.meetings.items())), line.waits)
        if sign != wait.sign:
            wait.sign, wait.rounds = sign, 0
            return
        wait.rounds += 1
        if line.waits.startswith(LEFT) and wait.rounds > 2:
            self.fail(rank, f"rank {rank} {line.waits.removeprefix(LEFT)}; rank {self.own} waits for {wait.what}")
        elif wait.rounds * self.interval > self.timeout - 3 * self.interval:
            self.fail(rank, f"rank {rank} has not moved for {self.timeout:g} s; rank {self.own} waits for {wait.what}")

    def _late(self, waits: str, members: Sequence[int]) -> int:
        """Of a meeting, the first rank that hasn't come; this one if all have."""
        group = waits.removeprefix(EVERYONE)
        mine = self._state.meetings.get(group, 0)
        for rank in members:
            if rank != self.own and self._hear(rank).meetings.get(group, 0) < mine:
                return rank
        return self.own


def _fault(text: bytes) -> RankError:
    rank, words = json.loads(text)
    return RankError(rank, words)
