"""Runs the checks of this folder in Triton's interpreter, each group in a process of its own (the choice is made at import)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy
import pytest

HERE = Path(__file__).parent
SLOW = (("check_ops.py", "ssd"), ("check_ops.py", "delta"), ("check_traffic.py", "dense"), ("check_steps.py", "test"))
OPS = ("linear_scan or complex and not dense", "dense", "selective_scan", "ssd", "delta", "causal_conv1d")


def unable() -> str:
    """Why kernels can't be interpreted here; nothing where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    versions = version("triton"), numpy.__version__
    too_old = tuple(int(part) for part in versions[0].split(".")[:2]) < (3, 7)
    too_new = tuple(int(part) for part in versions[1].split(".")[:2]) >= (2, 4)
    return f"Triton {versions[0]} can't interpret with NumPy {versions[1]}: take NumPy 2.3" if too_old and too_new else ""


pytestmark = pytest.mark.skipif(bool(unable()), reason=unable())


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
@pytest.mark.parametrize(("file", "op"), SLOW)
def test_the_rest(file: str, op: str) -> None:
    run_checks(file, "-m", "slow", "--timeout", "2000", "-k", op)


def test_bytes_moved() -> None:
    run_checks("check_traffic.py")


def test_loss_norm_and_random_numbers() -> None:
    run_checks("check_others.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_joined_ranges() -> None:
    run_checks("check_joining.py", "--timeout", "900")


def test_training_steps() -> None:
    run_checks("check_steps.py")
