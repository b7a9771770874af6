"""Plans on two and three ranks: gradients equal to plain autograd's, budgets kept, parameters where their layers are."""

from __future__ import annotations

import pytest
from generated import BlockSpec, CallSpec, StackSpec
from mesh_work import Case, Row, compare_all, mismatched, replicated, tied_apart
from ranks import run_ranks

pytestmark = pytest.mark.distributed

TWO = (BlockSpec("selective", gate=True), BlockSpec("ssd", mlp=True))
THREE = (BlockSpec("diagonal"), BlockSpec("conv", norm="rms"), BlockSpec("delta"))
ON_TWO = (
    Case(StackSpec(TWO, tied=True, loss="shifted"), CallSpec(2, 13, 1, 3), "layers", tight=True),
    Case(StackSpec(TWO, tied=True, loss="shifted"), CallSpec(2, 13, 1, 3), "time", tight=True),
    Case(StackSpec((BlockSpec("complex"), BlockSpec("shift", frozen=True)), loss="labels"), CallSpec(2, 9, 0, 4), "time"),
)
ON_THREE = (
    Case(StackSpec(THREE, loss="outer"), CallSpec(1, 11, 2, 4), "layers"),
    Case(StackSpec(TWO, shared=True, tokens=False, loss="mean"), CallSpec(1, 7, 3, 2), "layers"),
    Case(StackSpec(THREE, loss="outer"), CallSpec(1, 11, 2, 2), "time"),
    Case(StackSpec(TWO[:1], tied=True, loss="shifted"), CallSpec(1, 4, 2, 4), "time"),  # one chunk: two ranks have nothing to do
    Case(StackSpec(TWO[:1], loss="shifted"), CallSpec(1, 5, 2, 3), "time"),
)


def rows_of(count: int, cases: tuple[Case, ...]) -> list[list[Row]]:
    """By rank and case."""
    ended = run_ranks(count, compare_all, cases, seconds=280)
    assert [end.error for end in ended] == [""] * count
    return [end.result for end in ended]


@pytest.mark.parametrize(("count", "cases"), [(2, ON_TWO), (3, ON_THREE)])
def test_ranks_have_the_gradients_of_plain_autograd(count: int, cases: tuple[Case, ...]) -> None:
    rows = rows_of(count, cases)
    for index, case in enumerate(cases):
        mine = [row[index] for row in rows]
        assert max(row.distance for row in mine) <= 1e-10, case
        assert {name for row in mine for name in row.names} == set(mine[0].wanted), case
        assert all(abs(row.loss - row.plain_loss) <= 1e-10 * max(1.0, abs(row.plain_loss)) for row in mine), case
        assert len({row.loss for row in mine}) == 1, case
        assert all(row.measured <= row.budget and row.predicted <= row.budget for row in mine), (case, mine)
        assert all(row.measured <= row.predicted for row in mine), (case, mine)
        assert all(row.sent[0] == row.sent[1] for row in mine), (case, mine)
        idle = any(row.sent == (0, 0) for row in mine)
        assert idle or all(row.summed[0] == row.summed[1] for row in mine), (case, mine)
        if case.dimension == "time":
            assert all(set(row.names) == set(row.wanted) for row in mine), case
        else:
            assert all(row.live < max(sum(r.live for r in mine), 1) for row in mine), case


@pytest.mark.parametrize("dimension", ["layers", pytest.param("time", marks=pytest.mark.slow)])
def test_replicas_have_the_mean_of_their_gradients(dimension: str) -> None:
    ended = run_ranks(4, replicated, dimension, seconds=280)
    assert [end.error for end in ended] == [""] * 4
    assert max(max(end.result) for end in ended) <= 1e-10


def test_ranks_that_differ_raise_before_any_work() -> None:
    ended = run_ranks(2, mismatched)
    assert [end.error for end in ended] == ["", ""]
    for first, second, words in zip(*(end.result[:4] for end in ended), ("input", "seed", "empty", "float32"), strict=True):
        assert first.startswith("RankError: rank 1"), first
        assert words in first
        assert words in second
    assert [end.result[4] for end in ended] == ["", ""]  # ranks that disagreed are in step again


def test_ranks_of_several_sums_make_their_groups_together() -> None:
    """Given one rank in two sets of ranks that share parameters, then all meet in both, and gradients are right."""
    ended = run_ranks(3, tied_apart)
    assert [end.error for end in ended] == [""] * 3
    assert [end.result[1] for end in ended] == [2] * 3
    assert max(end.result[0] for end in ended) <= 1e-10
