"""Training scripts on meshes: restarts from a checkpoint, ranks that read their own tokens, meshes that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mesh_training import LENGTH, reads_its_tokens, resumed
from ranks import run_ranks

import adjcomp


@pytest.mark.distributed
def test_a_restart_has_the_losses_of_a_run_without_a_break(tmp_path: Path) -> None:
    ended = run_ranks(2, resumed, str(tmp_path), seconds=280)
    assert [end.error for end in ended] == ["", ""]
    for end in ended:
        unbroken, restarted, _ = end.result
        assert unbroken == restarted
        assert unbroken[0] != unbroken[1]


@pytest.mark.distributed
def test_a_rank_needs_no_other_tokens_than_its_own() -> None:
    ended = run_ranks(2, reads_its_tokens, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    (first, *losses), (second, *others) = (end.result for end in ended)
    assert first[0] == 0
    assert first[1] == second[0]
    assert second[1] == LENGTH
    assert len({*losses, *others}) == 1


def test_a_mesh_is_a_device_mesh() -> None:
    with pytest.raises(TypeError, match="DeviceMesh"):
        adjcomp.compile(torch.nn.Linear(2, 2), mesh="layers")  # type: ignore[arg-type]
