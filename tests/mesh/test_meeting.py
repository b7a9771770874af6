"""Ranks that start anew with the same store: nothing of an earlier start is taken for the new one's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import adjcomp
from adjcomp.runtime.mesh.meeting import Meeting
from adjcomp.runtime.mesh.watch import Watch

pytestmark = pytest.mark.distributed
RANKS = (3, 5, 8)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def started(store: Any) -> list[Watch]:
    """All ranks, each in a thread; the first comes last."""
    with ThreadPoolExecutor(len(RANKS)) as pool:
        made = [pool.submit(Watch, store, RANKS, rank, 20.0, "model 0") for rank in reversed(RANKS)]
        return [future.result() for future in made][::-1]


def test_a_fault_of_an_earlier_start_is_forgotten(store: Any) -> None:
    first = started(store)
    first[1].fail(5, "rank 5 raised ArithmeticError: made to fail")
    with pytest.raises(adjcomp.RankError, match="made to fail"):
        first[1].check()
    for watch in first:
        watch.close()
    second = started(store)
    try:
        for watch in second:
            watch._round()
            watch.check()
    finally:
        for watch in second:
            watch.close()


def test_a_rank_that_does_not_come_is_named(store: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Watch, store, RANKS, rank, 1.5, "model 0") for rank in (3, 8)]
        for future in made:
            with pytest.raises(adjcomp.RankError, match="rank 5 has not come"):
                future.result()
    with pytest.raises(adjcomp.RankError, match="rank 3 has not come"):
        Meeting(dist.PrefixStore("model 1", store), RANKS, 5, 0.5)
