"""fully_shard underneath a compiled model: plain autograd's gradients, and everything in parts between steps."""

from __future__ import annotations

import pytest
from mesh_sharded import Gathered, Trained, gathered, refused, trained
from ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("shape", "names", "over", "tight"),
    [
        ((3,), ("time",), ("time",), True),
        pytest.param((2,), ("time",), ("time",), False, marks=pytest.mark.slow),
        pytest.param((2,), ("data",), ("data",), True, marks=pytest.mark.slow),
        pytest.param((2, 2), ("data", "time"), ("time",), False, marks=pytest.mark.slow),
        pytest.param((2, 2), ("data", "time"), ("data", "time"), False, marks=pytest.mark.slow),
    ],
)
def test_sharded_models_train_as_plain_ones(
    shape: tuple[int, ...], names: tuple[str, ...], over: tuple[str, ...], tight: bool
) -> None:
    count = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    ended = run_ranks(count, trained, shape, names, over, tight, seconds=280)
    assert [end.error for end in ended] == [""] * count
    rows: list[Trained] = [end.result for end in ended]
    for row in rows:
        assert row.distance <= 1e-10, row
        assert row.parameters <= 1e-9, row
        assert row.kept, row
        assert abs(row.loss - row.plain_loss) <= 1e-10, row
        assert row.measured <= row.budget, row
        assert row.parts < row.whole, row
    assert sum(row.parts for row in rows) >= rows[0].whole


@pytest.mark.parametrize(
    ("count", "tight"), [(2, False), pytest.param(2, True, marks=pytest.mark.slow), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_wholes_come_and_go_with_their_layers(count: int, tight: bool) -> None:
    ended = run_ranks(count, gathered, tight, seconds=280)
    assert [end.error for end in ended] == [""] * count
    for end in ended:
        row: Gathered = end.result
        assert row.distance <= 1e-10, row
        assert row.parameters < 0.6 * row.whole, row
        assert row.measured <= row.predicted <= row.budget, row
        assert tight or all(times <= 2 for times in row.begun.values()), row  # once for each direction
    assert all(end.result.begun == ended[0].result.begun for end in ended)


def test_what_cannot_be_run_is_refused() -> None:
    ended = run_ranks(2, refused, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    for end in ended:
        alone, layers, columns = end.result
        assert "mesh=" in alone
        assert "under a mesh of layers" in layers
        assert "first dimension" in columns
