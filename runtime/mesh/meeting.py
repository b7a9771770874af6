"""How ranks find each other in a store that may still know an earlier start of the same ranks.

A launcher's store outlives a restart: torchrun's has it so. Everything an earlier start has written is under a token of its first
rank. A start agrees on a new one: every rank writes a number of its own, the first rank calls the roll of the numbers that it
sees with its token, and a rank takes the token once the roll has its own number.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adjcomp.errors import RankError

PAUSE_SECONDS = 0.02  # between two looks at the store


class Meeting:
    """One rank's way into a part of a store that belongs to this start alone.

    store: with a name that is the same on all ranks. ranks: global ranks that come together, own: this one. timeout: seconds.
    """

    def __init__(self, store: Any, ranks: Sequence[int], own: int, timeout: float) -> None:
        self._store, self.ranks, self.own, self.timeout = store, tuple(ranks), own, timeout
        self._mine = uuid.uuid4().hex
        self._until = time.monotonic() + timeout
        store.set_timeout(timedelta(seconds=timeout))
        store.set(f"number {own}", self._mine)
        token = self._mine if own == self.ranks[0] else self._token()
        self.fresh = dist.PrefixStore(token, store)  # type: ignore[attr-defined]
        self.fresh.set_timeout(timedelta(seconds=timeout))

    def _token(self) -> str:
        """The token of this start, from the first rank. RankError where that one doesn't come."""
        while True:
            if self._store.check(["roll"]):
                token, numbers = json.loads(self._store.get("roll"))
                if numbers.get(str(self.own)) == self._mine:
                    return str(token)
            self._wait_for(self.ranks[0])

    def complete(self) -> None:
        """Return when every rank has written its key, its number, in the fresh part. RankError where one doesn't come."""
        for rank in self.ranks:
            while not self.fresh.check([str(rank)]):
                if self.own == self.ranks[0]:
                    self._call()
                self._wait_for(rank)

    def _call(self) -> None:
        """The roll, with the newest number of every rank."""
        here = [rank for rank in self.ranks if self._store.check([f"number {rank}"])]
        numbers = {rank: self._store.get(f"number {rank}").decode() for rank in here}
        self._store.set("roll", json.dumps([self._mine, numbers]))

    def _wait_for(self, rank: int) -> None:
        if time.monotonic() > self._until:
            raise RankError(rank, f"rank {rank} has not come to compile() within {self.timeout:g} s")
        time.sleep(PAUSE_SECONDS)
