"""Meshes with layers and time: gradients equal to plain autograd's, parameters where their stage is, chunks dealt out in turn."""

from __future__ import annotations

import pytest
from generated import BlockSpec, CallSpec, StackSpec
from mesh_grid import LENGTH, beside_data, family, reads_its_tokens
from mesh_work import Case, Row, compare_all
from ranks import run_ranks

pytestmark = pytest.mark.distributed

TWO = (BlockSpec("selective", gate=True), BlockSpec("ssd", mlp=True))
THREE = (BlockSpec("diagonal"), BlockSpec("conv", norm="rms"), BlockSpec("delta"))
SMALL = (Case(StackSpec(TWO, tied=True, loss="shifted"), CallSpec(2, 13, 1, 3), "time,layers", tight=True, shape=(2, 2)),)
OTHERS = (
    Case(StackSpec(TWO, tied=True, loss="shifted"), CallSpec(2, 13, 1, 3), "layers,time", shape=(2, 2)),
    Case(StackSpec(THREE, loss="outer"), CallSpec(1, 11, 2, 2), "layers,time", shape=(2, 2), tight=True),
    Case(StackSpec(THREE, loss="outer"), CallSpec(1, 11, 2, 2), "layers,time", shape=(1, 4)),
    Case(StackSpec(TWO, shared=True, tokens=False, loss="mean"), CallSpec(1, 7, 3, 2), "layers,time", shape=(2, 2), tight=True),
    Case(
        StackSpec((BlockSpec("complex"), BlockSpec("shift", frozen=True)), loss="labels"),
        CallSpec(2, 9, 0, 4),
        "time,layers",
        shape=(2, 2),
    ),
)


@pytest.mark.parametrize("cases", [SMALL, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_ranks_of_a_grid_have_the_gradients_of_plain_autograd(cases: tuple[Case, ...]) -> None:
    ended = run_ranks(4, compare_all, cases, seconds=280)
    assert [end.error for end in ended] == [""] * 4
    for index, case in enumerate(cases):
        rows: list[Row] = [end.result[index] for end in ended]
        assert max(row.distance for row in rows) <= 1e-10, case
        assert {name for row in rows for name in row.names} == set(rows[0].wanted), case
        assert len({row.loss for row in rows}) == 1, case
        assert abs(rows[0].loss - rows[0].plain_loss) <= 1e-10 * max(1.0, abs(rows[0].plain_loss)), case
        assert all(row.measured <= row.predicted <= row.budget for row in rows), (case, rows)
        assert all(row.sent[0] == row.sent[1] for row in rows), (case, rows)
        most = max(row.summed[1] for row in rows)  # what ranks without work, who want all gradients, take part in
        assert all(row.summed[0] == (row.summed[1] or most) for row in rows), (case, rows)
    small = [end.result[0] for end in ended]
    assert len({row.live for row in small}) == 2 or cases is not SMALL  # two stages, each with its own parameters on both ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "length", "shape"), [("mamba", 1, 53, (2, 2)), ("mamba2", 2, 47, (2, 2)), ("dense", 2, 37, (2, 2))]
)
def test_families_on_a_grid_have_the_gradients_of_plain_autograd(
    name: str, batch: int, length: int, shape: tuple[int, int]
) -> None:
    ended = run_ranks(4, family, name, batch, length, shape, seconds=280)
    assert [end.error for end in ended] == [""] * 4
    assert max(end.result[0] for end in ended) <= 1e-5
    assert max(end.result[1] for end in ended) <= 1e-5
    assert all(end.result[2] > 0 for end in ended)


def test_a_rank_of_a_grid_reads_every_second_chunk() -> None:
    ended = run_ranks(2, reads_its_tokens, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    assert [end.result[0] for end in ended] == [[(0, 3), (6, 9), (12, LENGTH)], [(3, 6), (9, 12)]]
    assert len({loss for end in ended for loss in end.result[1:]}) == 1


def test_dimensions_come_in_any_order_and_auto_comes_alone() -> None:
    ended = run_ranks(4, beside_data, ("time", "data", "layers"), (2, 1, 2), seconds=280)
    assert [end.error for end in ended] == [""] * 4
    assert [end.result[0] for end in ended] == [0, 2, 1, 3]
    assert {end.result[1] for end in ended} == {(0, 2, 1, 3)}
    assert all("'auto' can't have layers" in end.result[2] for end in ended)
