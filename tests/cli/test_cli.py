"""The command line, called as a function; two tests start it as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import run_python

from adjcomp.cli import build_parser, main, parse_count
from adjcomp.commands import COMMANDS
from adjcomp.ir.plan import Plan
from adjcomp.model_shapes import SHAPES

SMALL = """
import torch
import fidelity

def stack():
    return fidelity.diagonal_stack(layers=2, width=8)

def series():
    return fidelity.diagonal_stack(layers=2, width=8, vocab=None), lambda batch, steps: (torch.zeros(batch, steps, 8),)

def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of small models in the current folder."""
    (tmp_path / "small_models.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("small_models", None)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A small plan, saved."""
    assert main(["plan", "small_models:stack", "--seq-len", "256", "--budget", "1MiB", "--json", "plan.json"]) == 0
    return str(tmp_path / "plan.json")


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """What a command that fails prints on stderr."""
    assert main(words) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_help_names_every_command_without_importing_torch() -> None:
    done = run_python("import sys, adjcomp.cli as c\ntry: c.main(['--help'])\nfinally: print('torch' in sys.modules)")
    assert done.stdout.endswith("False\n")
    assert all(f"\n    {name} " in done.stdout for name in COMMANDS)


def test_the_console_script_runs() -> None:
    done = subprocess.run([Path(sys.executable).with_name("adjcomp"), "machines"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a100-40gb     39.50 GiB      312   1555        300           25             50\n" in done.stdout


def test_parser_and_commands_agree() -> None:
    (group,) = build_parser()._subparsers._group_actions
    assert list(group.choices) == list(COMMANDS)


@pytest.mark.parametrize(("text", "count"), [("7", 7), ("65_536", 65536), ("64K", 65536), ("1m", 1 << 20), ("2G", 1 << 31)])
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5K", "K", "1MB", "_", "²"])
def test_no_other_count_is_accepted(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "mamba-130m", f"--seq-len={text}"])
    assert stopped.value.code == 2
    assert "is no positive number" in capsys.readouterr().err


def test_plan_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "small_models:series", "--seq-len", "1K", "--batch-size", "2", "--machine", "a100-40gb"]
    assert main([*words, "--html", "p.html", "--json", "p.json", "--perfetto", "t.json"]) == 0
    assert "Plan: 1024 tokens" in capsys.readouterr().out
    assert Plan.from_json((tmp_path / "p.json").read_text()).costs.seq_len == 1024
    assert (tmp_path / "p.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_show_and_diff_read_a_saved_plan(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["show", saved]) == 0
    assert capsys.readouterr().out.startswith("Plan: 256 tokens")
    assert main(["diff", saved, saved]) == 0
    assert main(["plan", "small_models:stack", "--seq-len", "128", "--json", "other.json"]) == 0
    capsys.readouterr()
    assert main(["diff", saved, "other.json"]) == 1
    assert "seq len" in capsys.readouterr().out


def test_frontier_prints_a_row_for_every_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "small_models:stack", "--seq-len", "64", "--machine", "a100-40gb", "--points", "2"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["peak", "step", "tokens/s", "gap", "chunk", "of", "the", "fastest"]
    assert rows[-1].endswith("1.00x")


def test_check_judges_by_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small_models:stack", "--seq-len", "40"]) == 0
    assert "\nwithin the bound of 1e-05\n" in capsys.readouterr().out
    assert main(["check", "small_models:stack", "--seq-len", "40", "--bound", "0"]) == 1


def test_explain_prints_the_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "small_models:stack"]) == 0
    assert capsys.readouterr().out.startswith("Residual: a residual stack of 2 layers between stem and head, d_model 8\n")


def test_an_impossible_budget_names_the_minimum(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the minimum is" in refused(capsys, "plan", "small_models:stack", "--seq-len", "256", "--budget", "1KiB", code=1)


def test_an_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "explain", "no-such-model")
    assert all(name in message for name in SHAPES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "small_models:stack", "--seq-len", "64", "--machine", "abacus"], "unknown machine 'abacus'; known: cpu"),
        (["plan", "small_models:stack", "--seq-len", "64", "--budget", "lots"], "'lots' is no byte count"),
        (["plan", "small_models:stack", "--seq-len", "64", "--optimizer", "magic"], "unknown optimizer 'magic'; known"),
        (["plan", "small_models:stack", "--seq-len", "64", "--json", "no/such/p.json"], "there is no such folder"),
        (["explain", "small_models:none"], "has no function 'none'"),
        (["explain", "small_models:nothing"], "must return a torch.nn.Module"),
        (["explain", "no_such_module:f"], "No module named 'no_such_module'"),
        (["check", "small_models:series", "--seq-len", "0x10"], None),
        (["show", "small_models.py"], "small_models.py: "),
        (["show", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if message is None:
        with pytest.raises(SystemExit):
            main(words)
    else:
        assert message in refused(capsys, *words)


def test_models_by_name_ask_for_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'adjcomp[hf]'" in refused(capsys, "explain", "mamba-130m")


@pytest.mark.parametrize("name", ["mamba-130m", "mamba2-130m"])
def test_a_named_shape_has_its_published_size(name: str) -> None:
    from adjcomp.model_shapes import find_model

    model = find_model(name, device="meta", dtype="bfloat16").model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(129e6, rel=0.01)
    assert {p.device.type for p in model.parameters()} == {"meta"}
