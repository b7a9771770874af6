"""A rank that dies, raises or stops: every other rank raises an error that names it, in time, and no gradient is set."""

from __future__ import annotations

import math
import signal

import pytest
from generated import BlockSpec, CallSpec, StackSpec
from mesh_work import failing
from ranks import run_ranks

pytestmark = pytest.mark.distributed

STACK = StackSpec((BlockSpec("selective"), BlockSpec("ssd")), loss="shifted")
CALL = CallSpec(1, 24, 1, 4)
RAISES = 0


def check(kind: int, dimension: str, at: int, shape: tuple[int, ...] = (3,), *, sharded: bool = False) -> None:
    """Rank 1 of those of a mesh fails at its action number `at`."""
    silent, count = (1,) if kind == signal.SIGSTOP else (), math.prod(shape)
    ended = run_ranks(count, failing, STACK, CALL, dimension, shape, kind, at, sharded, seconds=200, silent=silent)
    for rank in sorted({*range(count)} - {1}):
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, RAISES, signal.SIGSTOP])
@pytest.mark.parametrize("at", [2, 11, 19, 28])
def test_a_failing_rank_of_a_grid_is_named_by_all_others(kind: int, at: int) -> None:
    check(kind, "layers,time", at, (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, RAISES, signal.SIGSTOP])
@pytest.mark.parametrize("at", [3, 12, 21, 30])
def test_a_failing_rank_of_a_sharded_model_is_named_by_all_others(kind: int, at: int) -> None:
    check(kind, "time", at, sharded=True)
