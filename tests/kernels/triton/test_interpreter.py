"""Runs the checks of this folder in Triton's interpreter, each group in a process of its own (the choice is made at import)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPS = ("linear_scan or complex and not dense", "dense", "selective_scan", "ssd", "delta", "causal_conv1d")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_checks(file: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", OPS)
def test_ops(op: str) -> None:
    run_checks("check_ops.py", "-k", op)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("file", "op"), [("check_ops.py", "ssd"), ("check_ops.py", "delta"), ("check_traffic.py", "dense")])
def test_the_rest_of_heavy_ops(file: str, op: str) -> None:
    run_checks(file, "-m", "slow", "--timeout", "2000", "-k", op)


def test_bytes_moved() -> None:
    run_checks("check_traffic.py")


def test_loss_norm_and_random_numbers() -> None:
    run_checks("check_others.py")
