"""The script for a GPU runs through on a small scale, wherever it is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.py")


def test_the_run_goes_through_on_a_small_scale(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--preset", "tiny", "--device", "cpu", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = json.loads(output.read_text())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert {row["section"] for row in rows} == {"correctness", "first calls", "speed", "graphs", "steps"}
    assert all(row["ok"] for row in rows)
    assert all(row["floor_seconds"] > 0 and row["seconds"] > 0 for row in rows if row["section"] == "speed")
    assert "left out" not in done.stdout


def test_a_row_that_breaks_or_hangs_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that dies and one that takes too long, when the next rows come, then new processes measure them."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    workers = importlib.import_module("workers")
    worker = workers.Worker(torch.device("cpu"), True)
    known = list(enumerate(workers.jobs(torch.device("cpu"), True)))
    index, job = next((i, job) for i, job in known if job.name == "counter_uniform")
    try:
        assert worker.row(index, job, 60.0).ok
        worker.process.kill()
        assert worker.row(index, job, 60.0).note == "its process died"
        monkeypatch.setattr(workers, "STARTING", 0.0)
        assert "stopped after" in worker.row(index, job, 0.0).note
        assert worker.process is None
    finally:
        worker.close()


@pytest.mark.gpu
@pytest.mark.timeout(700)
def test_the_run_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cuda", "--output", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
