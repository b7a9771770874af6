"""The repository as data: its folders, its Python files, the packages it should install, and interpreters to try them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"adjcomp": "adjcomp", "passes": "adjcomp.passes", "runtime": "adjcomp.runtime"}  # folder: the package it holds
TOP_LEVEL = ("pyproject.toml", "README.md", "LICENSE", *SOURCES)  # what a build reads


def pyproject() -> dict:
    """The project file, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files(folder: str, pattern: str = "*.py") -> list[Path]:
    """Files below a top-level folder, sorted; links are not followed, so no file appears twice."""
    found: list[Path] = []
    for here, folders, names in os.walk(ROOT / folder, followlinks=False):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(here, name) for name in names if Path(name).match(pattern)]
    return sorted(found)


def packages_on_disk() -> set[str]:
    """Dotted names of all folders that hold a Python file."""
    names = set()
    for folder, package in SOURCES.items():
        for file in source_files(folder):
            names.add(".".join([package, *file.parent.relative_to(ROOT / folder).parts]))
    return names


def module_names() -> list[str]:
    """Dotted names of all modules; a package stands for its __init__."""
    names = []
    for folder, package in SOURCES.items():
        for file in source_files(folder):
            parts = [package, *file.relative_to(ROOT / folder).with_suffix("").parts]
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


def copy_sources(target: Path) -> Path:
    """Copy what a build reads to an empty folder, links as links, so that no leftover of an earlier build takes part."""
    target.mkdir(parents=True)
    for name in TOP_LEVEL:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def build(kind: str, source: Path, output: Path) -> Path:
    """Call one hook of the build backend, `kind` of "wheel", "sdist" or "editable", as an installer would.

    Errors: CalledProcessError with the backend's output when the build fails.
    """
    output.mkdir(parents=True, exist_ok=True)
    call = f"import setuptools.build_meta as backend; backend.build_{kind}({str(output)!r})"
    subprocess.run([sys.executable, "-c", call], cwd=source, check=True, capture_output=True, text=True)
    (made,) = output.iterdir()
    return made


def fresh_interpreter(folder: Path) -> Path:
    """Make an environment that sees this one's third-party packages but not its adjcomp; returns its site-packages.

    The link to this environment is a plain path entry, whose own .pth files (that of an editable adjcomp) are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def run_python(code: str, interpreter: Path | str = sys.executable, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, without the current folder and PYTHONPATH on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(interpreter), "-P", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
