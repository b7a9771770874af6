"""Time ranges joined by summaries on three and four ranks: the gradients of plain autograd, budgets kept, bytes as planned."""

from __future__ import annotations

import pytest
from generated import BlockSpec, CallSpec, StackSpec
from mesh_joined import family, random_masks
from mesh_sharded import Trained, trained
from mesh_work import Case, Row, compare_all
from ranks import run_ranks

pytestmark = pytest.mark.distributed

MIXED = (BlockSpec("selective", gate=True), BlockSpec("ssd", mlp=True), BlockSpec("delta"))
HALOS = (BlockSpec("conv", norm="rms"), BlockSpec("cumsum"), BlockSpec("shift"))


FAMILIES = [
    (3, "mamba", 2, 47),
    (4, "mamba", 1, 61),
    (3, "mamba2", 1, 53),
    (4, "mamba2", 2, 45),
    (4, "dense", 2, 59),
    (3, "learned", 2, 40),
    (4, "learned", 1, 53),
]


def joined(blocks: tuple[BlockSpec, ...], call: CallSpec, *, tight: bool = False, **stack: object) -> Case:
    """A case whose ranges are joined by summaries, whatever else would be faster."""
    return Case(StackSpec(blocks, **stack), call, "time", tight=tight, summaries=True)  # type: ignore[arg-type]


SHORT = {4: (joined(MIXED, CallSpec(2, 29, 1, 4), tied=True, loss="shifted"),)}
LONG = {
    3: (
        joined(MIXED, CallSpec(1, 31, 3, 3), loss="outer", tight=True),
        joined(HALOS, CallSpec(2, 23, 2, 5), loss="outer", tight=True),
        joined((BlockSpec("complex", in_place=True), BlockSpec("selective", frozen=True)), CallSpec(2, 22, 4, 4), loss="labels"),
        joined((BlockSpec("shift", frozen=True), BlockSpec("delta", gate=True)), CallSpec(1, 17, 4, 4), loss="mean"),
    ),
    4: (
        joined(HALOS, CallSpec(1, 23, 2, 4), loss="outer"),
        joined(MIXED, CallSpec(2, 17, 1, 4), loss="mean", tokens=False, shared=True, tight=True),
        joined(
            (BlockSpec("conv"), BlockSpec("diagonal", mlp=True)), CallSpec(1, 37, 1, 4), loss="shifted", tied=True, tight=True
        ),
        joined((BlockSpec("delta"), BlockSpec("complex")), CallSpec(2, 41, 1, 7), loss="shifted"),
    ),
}


def rows_of(count: int, cases: tuple[Case, ...]) -> list[list[Row]]:
    """By rank and case."""
    ended = run_ranks(count, compare_all, cases, seconds=280)
    assert [end.error for end in ended] == [""] * count
    return [end.result for end in ended]


def check(count: int, cases: tuple[Case, ...]) -> None:
    """Every case on `count` ranks."""
    rows = rows_of(count, cases)
    for index, case in enumerate(cases):
        mine = [row[index] for row in rows]
        assert mine[0].joins > 0, case
        assert max(row.distance for row in mine) <= 1e-10, (case, [row.distance for row in mine])
        assert all(set(row.names) == set(row.wanted) for row in mine), case
        assert all(abs(row.loss - row.plain_loss) <= 1e-10 * max(1.0, abs(row.plain_loss)) for row in mine), case
        assert all(row.measured <= row.budget and row.measured <= row.predicted for row in mine), (case, mine)
        assert all(row.sent[0] == row.sent[1] and row.summed[0] == row.summed[1] for row in mine), (case, mine)


def test_joined_ranges_have_the_gradients_of_plain_autograd() -> None:
    check(4, SHORT[4])


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_all_kinds_of_states_joined_have_the_gradients_of_plain_autograd(count: int) -> None:
    check(count, LONG[count])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "name", "batch", "length"), FAMILIES)
def test_families_of_models_joined_have_the_gradients_of_plain_autograd(count: int, name: str, batch: int, length: int) -> None:
    ended = run_ranks(count, family, name, batch, length, 7, seconds=280)
    assert [end.error for end in ended] == [""] * count
    bound = 1e-10 if name == "learned" else 1e-5
    assert all(worst <= bound and loss <= bound and joins > 0 for worst, loss, joins in (end.result for end in ended)), ended


@pytest.mark.slow
@pytest.mark.parametrize("tight", [False, True])
def test_joined_ranges_train_sharded_parameters_as_plain_ones(tight: bool) -> None:
    ended = run_ranks(3, trained, (3,), ("time",), ("time",), tight, True, seconds=280)
    assert [end.error for end in ended] == [""] * 3
    rows: list[Trained] = [end.result for end in ended]
    assert all(row.distance <= 1e-10 and row.parameters <= 1e-9 and row.kept for row in rows), rows
    assert all(row.measured <= row.predicted <= row.budget for row in rows), rows


@pytest.mark.slow
def test_masks_do_not_depend_on_whether_ranges_are_joined() -> None:
    ended = run_ranks(3, random_masks, seconds=280)
    assert [end.error for end in ended] == [""] * 3
    assert max(max(end.result) for end in ended) <= 1e-10
