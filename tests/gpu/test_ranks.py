"""Plans on several GPUs, where there are several; the script itself also on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from repository import ROOT

pytestmark = pytest.mark.distributed


def run(ranks: int, *options: str) -> None:
    """The script on some ranks of this computer."""
    script = str(ROOT / "tests" / "gpu" / "check_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script, *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_plans_on_all_gpus_are_right() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    run(count)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_script_runs_on_cpus(ranks: int) -> None:
    run(ranks, "--cpu")
