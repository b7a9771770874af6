"""Under a mesh of layers, what would read parameters of other ranks is refused, and losses without gradients are not."""

from __future__ import annotations

import pytest
from mesh_elsewhere import evaluated_and_refused, of_several_shapes
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_parameters_of_other_ranks_are_never_read() -> None:
    ended = run_ranks(2, evaluated_and_refused, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    for rank, end in enumerate(ended):
        losses, errors, printed = end.result
        assert max(losses) - min(losses) <= 1e-12, losses
        for what, text in errors.items():
            assert f"is on rank {1 - rank}, not on rank {rank}" in text, (what, text)
            assert "rank 0 has" in text, (what, text)
            assert "local_state" in text, (what, text)
        assert f"is on rank {1 - rank}" in printed


def test_layers_stay_where_they_are_for_every_shape() -> None:
    ended = run_ranks(2, of_several_shapes, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    for end in ended:
        distances, layers = end.result
        assert max(distances) <= 1e-10, distances
        assert all(own == layers[0] for own in layers), layers
        assert layers[0]
