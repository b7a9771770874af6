"""torchrun starts ranks again after one has died, and the run ends where one without a break does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]


def train(folder: Path, placement: str, shape: tuple[int, ...], steps: int, dies_after: int) -> str:
    """What a run of the example prints; rank 1 dies after a step, once, or never (0)."""
    script = [str(ROOT / "tests" / "support" / "dies_once.py"), str(folder / "died"), str(dies_after)]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(math.prod(shape)),
        "--max-restarts",
        "1",
    ]
    options = ["--placement", placement, "--tokens", "256", "--steps", str(steps), "--checkpoints", str(folder)]
    options += ["--shape", ",".join(map(str, shape))]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's own store still has the addresses of the ranks that died
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([*launch, *script, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    dcp_to_torch_save(folder / str(step), folder / "whole.pt")
    found: dict[str, torch.Tensor] = torch.load(folder / "whole.pt")
    return found


@pytest.mark.parametrize(
    ("placement", "shape", "later"),
    [("layers", (2,), ("layers", (3,))), ("time", (2,), ("time", (3,))), ("layers,time", (2, 2), ("layers", (3,)))],
)
def test_a_restarted_run_ends_where_an_unbroken_one_does(
    placement: str, shape: tuple[int, ...], later: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """Given a rank that is killed after the second of four steps, then all parameters and optimizer states are the same, bit for
    bit; and three ranks can go on from there.
    """
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "broken").mkdir()
    train(tmp_path / "unbroken", placement, shape, 4, 0)
    printed = train(tmp_path / "broken", placement, shape, 4, 2)
    assert (tmp_path / "broken" / "died").exists()
    assert printed.count("step 3, rank 0") == 1
    wanted, found = state(tmp_path / "unbroken", 4), state(tmp_path / "broken", 4)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    printed = train(tmp_path / "broken", *later, 5, 0)
    assert "step 5, rank 2" in printed
    assert "step 4" not in printed
