"""What `import adjcomp` costs, and what its declared entry points are."""

from __future__ import annotations

import importlib
import json

from repository import pyproject, run_python

HEAVY = ["triton", "ortools", "transformers", "matplotlib", "plotly", "pandas"]


def loaded_after(statement: str) -> set[str]:
    """Which of the heavy packages a fresh process has loaded after a statement."""
    done = run_python(f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_adjcomp_loads_nothing_heavy_beside_torch() -> None:
    assert loaded_after("import adjcomp") - loaded_after("import torch") == set()


def test_public_names_exist() -> None:
    adjcomp = importlib.import_module("adjcomp")
    assert [name for name in adjcomp.__all__ if getattr(adjcomp, name, None) is None] == []


def test_the_console_script_exists() -> None:
    module, function = pyproject()["project"]["scripts"]["adjcomp"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
