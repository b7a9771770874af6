"""The tuner's choices, with a clock of one's own in place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from adjcomp.runtime.kernels.triton import catalogue, configs, tune
from adjcomp.runtime.kernels.triton.configs import Config, Row

COMMON = Row(Config("k", {"BLOCK_D": 64, "UNROLL": 2}, warps=4))


def cost(row: Row) -> float:
    """Least at BLOCK_D 128, UNROLL 2 and 2 warps."""
    sizes = row.config.constants
    return 1.0 + abs(sizes["BLOCK_D"] / 128 - 1) + abs(sizes["UNROLL"] / 2 - 1) + abs(row.config.warps / 2 - 1)


def test_it_walks_to_the_fastest() -> None:
    found = tune.improved(COMMON, "sm_90", cost)
    assert found == replace(COMMON, architecture="sm_90", config=Config("k", {"BLOCK_D": 128, "UNROLL": 2}, warps=2))


def test_what_fails_or_is_as_fast_is_passed_over() -> None:
    assert tune.improved(COMMON, "sm_90", lambda row: 1.0) is None
    assert tune.improved(COMMON, "sm_90", lambda row: None) is None
    assert tune.improved(COMMON, "sm_90", lambda row: 1.0 if row == COMMON else None) is None
    found = tune.improved(COMMON, "sm_90", lambda row: cost(row) if row.config.warps == 4 else None)
    assert found is not None
    assert found.config.warps == 4


def test_variants_are_one_step_away() -> None:
    found = list(tune.variants(Config("k", {"BLOCK_D": 16, "UNROLL": 1}, warps=16)))
    assert [(c.constants["BLOCK_D"], c.constants["UNROLL"], c.warps) for c in found] == [(32, 1, 16), (16, 2, 16), (16, 1, 8)]


@pytest.mark.parametrize("call", catalogue.CALLS)
def test_the_rows_of_a_call_are_found(call: catalogue.Call) -> None:
    rows = tune.taken(call, torch.float32)
    assert rows
    assert {row.architecture for row in rows} == {"any"}


def test_a_table_in_place_of_the_installed_one() -> None:
    kernel, device = "linear_scan", torch.device("cpu")
    other = Row(Config(kernel, {"BLOCK_D": 32, "UNROLL": 1}))
    before = configs.choose(kernel, device, channels=3)
    with configs.table([other]):
        assert configs.choose(kernel, device, channels=3) == other.config
    assert configs.choose(kernel, device, channels=3) == before
