"""Kernels compiled ahead of time for GPUs that need not be there, and the table of their configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from adjcomp.runtime.kernels.determinism import fixed_kernels
from adjcomp.runtime.kernels.triton import aot, catalogue, configs
from adjcomp.runtime.kernels.triton.aot import Row


def compile_all(output: Path, *options: str) -> list[Row]:
    command = [sys.executable, "-m", "adjcomp.runtime.kernels", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [Row(**row) for row in json.loads(output.read_text())]


@pytest.mark.timeout(900)
def test_every_kernel_compiles_without_a_spill(tmp_path: Path) -> None:
    rows = compile_all(tmp_path / "kernels.json", "--quick", "--workers", "2")
    assert {row.kernel for row in rows} == {launch.name for launch in catalogue.launches("sm_90", quick=True)}
    assert {row.target for row in rows} == {"sm_90"}
    assert all(row.registers > 0 and row.spill_bytes == 0 and not row.faults for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    rows = compile_all(tmp_path / "kernels.json")
    assert {row.target for row in rows} == set(aot.TARGETS)
    assert not [row for row in rows if row.faults]


def test_the_catalogue_and_the_table_name_the_same_kernels() -> None:
    """Rows of the table that no launch takes would be untested; a launch without a row could not be."""
    taken = {launch.config.kernel for target in aot.TARGETS for launch in catalogue.launches(target)}
    assert taken == {row.config.kernel for row in configs.rows()}


def test_the_table_reads_as_it_was_written() -> None:
    assert configs.TABLE.read_text() == configs.text(configs.rows())


@pytest.fixture
def row() -> Row:
    return Row("k", "BLOCK=1", "gfx942", "fp32", 64, 0, 1024, 128, 0.5, 0.1, "k", 1024)


def faulty(row: Row) -> Iterator[tuple[Row, str]]:
    yield replace(row, spill_bytes=8), "spills 8 bytes"
    yield replace(row, shared_bytes=1 << 17, table_bytes=1 << 17), "gfx942 has 65536"
    yield replace(row, shared_bytes=2048), "table.json says 1024"
    yield replace(row, widest_load=16), "reads only 16 bits at a time"
    yield replace(row, error="CompilationError: no"), "CompilationError: no"


def test_faults_are_named(row: Row) -> None:
    assert row.faults == []
    for bad, message in faulty(row):
        assert any(message in fault for fault in bad.faults)


def test_a_deterministic_step_takes_rows_and_segments_for_any_device() -> None:
    """Given a tuned row for this device, when fixed kernels are asked for, then the common one is taken."""
    tuned = configs.Row(configs.Config("k", {"BLOCK": 1}), "meta")
    common = configs.Row(configs.Config("k", {"BLOCK": 2}))
    device = torch.device("meta")
    with configs.table([tuned, common]):
        assert configs.choose("k", device).constants["BLOCK"] == 1
        with fixed_kernels(True):
            assert configs.choose("k", device).constants["BLOCK"] == 2
            assert configs.segments(1 << 20, 1, 64, device) == 1024
        with fixed_kernels(False):
            assert configs.choose("k", device).constants["BLOCK"] == 1
    assert configs.segments(1 << 20, 1, 64, device) > 1024


def test_the_choice_goes_by_size_architecture_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(architecture: str, most: int, shared: int, block: int) -> configs.Row:
        return configs.Row(configs.Config("k", {"BLOCK": block}, shared_bytes=shared), architecture, {"n": most})

    table = (entry("sm_90", 16, 200 << 10, 1), entry("any", 16, 100 << 10, 2), entry("any", 64, 0, 3))
    monkeypatch.setattr(configs, "rows", lambda: table)
    chosen = {
        (name, size): configs._choose.__wrapped__("k", configs.Target(name, limit, 1), fixed, (("n", size),)).constants["BLOCK"]
        for name, limit, fixed in (("sm_90", 227 << 10, False), ("sm_80", 163 << 10, False), ("gfx942", 64 << 10, False))
        for size in (16, 17)
    }
    assert chosen == {
        ("sm_90", 16): 1,
        ("sm_90", 17): 3,
        ("sm_80", 16): 2,
        ("sm_80", 17): 3,
        ("gfx942", 16): 3,
        ("gfx942", 17): 3,
    }
    fixed = configs._choose.__wrapped__("k", configs.Target("sm_90", 227 << 10, 1), True, (("n", 16),))
    assert fixed.constants["BLOCK"] == 2  # a tuned table changes nothing where results must not depend on it
    with pytest.raises(ValueError, match=r"adjcomp kernel k: sizes \{'n': 65\}.*supported"):
        configs._choose.__wrapped__("k", configs.Target("sm_90", 227 << 10, 1), False, (("n", 65),))
