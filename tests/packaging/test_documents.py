"""README, docs and Makefile speak of things that exist, and everything a user can turn is described."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from repository import ROOT, SOURCES, run_python, source_files

MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", document.read_text(), flags=re.MULTILINE))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()) if "://" not in link]
    assert [link for link in targets if not (document.parent / link).exists()] == []


def test_every_script_that_make_runs_exists() -> None:
    scripts = re.findall(r"python ((?:tests|examples)/\S+\.py)", MAKEFILE)
    scripts += [module.replace(".", "/") + "/__main__.py" for module in re.findall(r"python -m (adjcomp\S*)", MAKEFILE)]
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_make_can_say_what_it_would_do() -> None:
    done = subprocess.run(["make", "-n", "demo", "test"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (example,) = (block for block in blocks if "import" in block)
    done = run_python(example.replace("65_536", "192").replace("num_hidden_layers=6", "num_hidden_layers=2"))
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stdout


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "development.md").read_text()
    sources = "".join(file.read_text() for folder in SOURCES for file in source_files(folder))
    used = set(re.findall(r"ADJCOMP_[A-Z_]+", sources))
    assert sorted(name for name in used if name not in text) == []
