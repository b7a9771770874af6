"""Activations are shared out: with everything kept, R ranks have at most 1 / (0.6 R) each of what one rank has."""

from __future__ import annotations

import pytest
from mesh_memory import activations
from ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("count", "shapes"),
    [
        (2, (("layers", (2,)), ("time", (2,)), ("layers,time", (1, 2)))),
        pytest.param(4, (("layers", (4,)), ("time", (4,)), ("layers,time", (2, 2))), marks=pytest.mark.slow),
    ],
)
def test_measured_activations_fall_with_the_number_of_ranks(count: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    ended = run_ranks(count, activations, shapes, seconds=280)
    assert [end.error for end in ended] == [""] * count
    for index, shape in enumerate(shapes, start=1):
        largest = max(end.result[index] for end in ended)
        assert largest <= ended[0].result[0] / (0.6 * count), (shape, largest, ended[0].result[0])
