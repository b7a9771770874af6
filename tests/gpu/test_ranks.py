"""Plans on several GPUs, where there are several."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from repository import ROOT


@pytest.mark.gpu
@pytest.mark.distributed
def test_gradients_on_all_gpus_are_those_of_one() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    script = str(ROOT / "tests" / "gpu" / "check_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
