"""What `import adjcomp` costs, and what its declared entry points are."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from repository import SOURCES, pyproject, run_python, source_files

HEAVY = ["triton", "ortools", "transformers", "matplotlib", "plotly", "pandas"]


def loaded_after(statement: str) -> set[str]:
    """Which of the heavy packages a fresh process has loaded after a statement."""
    done = run_python(f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_adjcomp_loads_nothing_heavy_beside_torch() -> None:
    every_name = "import adjcomp\nfor name in adjcomp.__all__: getattr(adjcomp, name)"
    assert loaded_after(every_name) - loaded_after("import torch") == set()


def test_the_package_and_its_command_line_import_without_torch() -> None:
    modules = "adjcomp, adjcomp.cli, adjcomp.commands, adjcomp.machine, adjcomp.ir.serialize, adjcomp.report.html"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"


@pytest.mark.parametrize("statement", ["from adjcomp.ops import linear_scan", "import adjcomp; adjcomp.ops"])
def test_ops_have_kernels_however_they_are_imported(statement: str) -> None:
    call = "print(float(torch.ops.adjcomp.linear_scan(torch.ones(1, 2, 1), torch.ones(1, 2, 1), None)[0].sum()))"
    code = f"{statement}\nimport torch\n{call}"
    done = run_python(code)
    assert done.stdout.strip() == "3.0", done.stderr


def test_public_names_are_those_that_type_checkers_see() -> None:
    adjcomp = importlib.import_module("adjcomp")
    assert set(adjcomp._HOMES) | {"ops"} == set(adjcomp.__all__)
    assert set(adjcomp.__all__) <= set(dir(adjcomp))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = adjcomp.no_such_name


def test_public_names_exist() -> None:
    adjcomp = importlib.import_module("adjcomp")
    assert [name for name in adjcomp.__all__ if getattr(adjcomp, name, None) is None] == []


def test_the_console_script_exists() -> None:
    module, function = pyproject()["project"]["scripts"]["adjcomp"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def imported_packages(file: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = pyproject()["project"]
    requirements = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in requirements} | {"adjcomp"}
    distribution = {"yaml": "pyyaml"}  # where the package isn't named like what installs it
    used = {name for folder in SOURCES for file in source_files(folder) for name in imported_packages(file)}
    missing = {name for name in used - set(sys.stdlib_module_names) if distribution.get(name, name) not in declared}
    assert missing == set()
