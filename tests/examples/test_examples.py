"""Every example runs, with small arguments, and its gradients are autograd's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from accelerate.state import AcceleratorState
from repository import ROOT

SMALL = {
    "s4d_stack": ["--tokens", "300", "--budget", "4MiB", "--steps", "2"],
    "complex_lru": ["--tokens", "300", "--budget", "4MiB", "--steps", "2"],
    "dense_selective": ["--tokens", "300", "--budget", "4MiB", "--steps", "2"],
    "paper_model": ["--tokens", "300", "--budget", "16MiB", "--steps", "2"],
    "own_loop": ["--tokens", "200", "--budget", "16MiB", "--steps", "2"],
    "hf_trainer": ["--tokens", "100", "--steps", "2"],
    "accelerate_loop": ["--tokens", "100", "--steps", "2"],
    "peft_lora": ["--tokens", "100", "--steps", "2"],
    "long_stream": ["--tokens", "300", "--steps", "2"],
    "lightning_loop": ["--tokens", "100", "--steps", "2"],
}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains_within_its_budget_with_exact_gradients(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "lightning_loop":
        pytest.importorskip("lightning")
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision of the process's first
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(SMALL[name])
    printed = capsys.readouterr().out
    (error,) = re.findall(r"largest relative error (\S+)", printed)
    assert float(error) <= 1e-5
    assert printed.count("step ") == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_for_several_ranks_trains_under_torchrun() -> None:
    words = ["--nproc-per-node", "2", str(ROOT / "examples" / "train_on_ranks.py"), "--tokens", "200", "--steps", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step ") == 4


def test_every_example_is_tried_here_or_by_make_demo() -> None:
    found = {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert found == {*SMALL, "train_long_context", "train_on_ranks"}
