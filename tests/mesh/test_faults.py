"""A rank that dies, raises or stops: every other rank raises an error that names it, in time, and no gradient is set."""

from __future__ import annotations

import signal

import pytest
from generated import BlockSpec, CallSpec, StackSpec
from mesh_work import failing
from ranks import run_ranks

pytestmark = pytest.mark.distributed

STACK = StackSpec((BlockSpec("selective"), BlockSpec("ssd")), loss="shifted")
CALL = CallSpec(1, 24, 1, 4)
RAISES = 0


def check(kind: int, dimension: str, at: int) -> None:
    """Rank 1 of three fails at its action number `at`."""
    silent = (1,) if kind == signal.SIGSTOP else ()
    ended = run_ranks(3, failing, STACK, CALL, dimension, kind, at, seconds=200, silent=silent)
    for rank in (0, 2):
        assert ended[rank].result is not None, (rank, ended[rank])  # neither hung nor died
        text, set_gradients = ended[rank].result
        assert "rank 1" in text, (rank, text)
        assert not set_gradients


@pytest.mark.parametrize(
    ("kind", "dimension", "at"),
    [(signal.SIGKILL, "layers", 9), pytest.param(RAISES, "time", 25, marks=pytest.mark.slow), (signal.SIGSTOP, "time", 14)],
)
def test_a_failing_rank_is_named_by_all_others(kind: int, dimension: str, at: int) -> None:
    check(kind, dimension, at)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, RAISES, signal.SIGSTOP])
@pytest.mark.parametrize("dimension", ["layers", "time"])
@pytest.mark.parametrize("at", [1, 4, 8, 13, 17, 22, 26, 30, 34, 38])
def test_a_failing_rank_is_named_wherever_it_fails(kind: int, dimension: str, at: int) -> None:
    check(kind, dimension, at)
