"""The folders keep their shape: the package list, the links, the size of files and functions, the names of imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, SOURCES, packages_on_disk, pyproject, source_files

CHECKED = [file for folder in (*SOURCES, "tests", "examples") for file in source_files(folder)]


def test_pyproject_lists_every_subpackage() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages_on_disk())


def test_every_subpackage_has_an_init_file() -> None:
    missing = [file.parent for folder in SOURCES for file in source_files(folder) if not (file.parent / "__init__.py").exists()]
    assert not missing


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_the_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "adjcomp" / name) == f"../{name}"


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_ruff_refuses_the_short_names(name: str) -> None:
    ruff = str(Path(sys.executable).parent / "ruff")
    command = [ruff, "check", "--no-cache", "--select", "TID251", "--stdin-filename", "adjcomp/sample.py", "-"]
    done = subprocess.run(command, input=f"import {name}\n", cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"Import adjcomp.{name}" in done.stdout


def test_files_are_short() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in CHECKED}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    long = {name: length for name, length in lengths.items() if length > 300}
    assert len(long) <= 0.1 * len(lengths), long


def statement_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its first statement after the docstring to its end."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": statement_lines(node)
        for folder in SOURCES
        for file in source_files(folder)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > 80} == {}
    long = {name: length for name, length in lengths.items() if length > 40}
    assert len(long) <= 0.05 * len(lengths), long


@pytest.mark.parametrize("folder", SOURCES)
def test_every_module_says_what_it_is(folder: str) -> None:
    assert [file for file in source_files(folder) if not ast.get_docstring(ast.parse(file.read_text()))] == []
