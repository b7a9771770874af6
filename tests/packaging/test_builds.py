"""What gets installed: one import package, whole, from a wheel, from an sdist and in place."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from repository import ROOT, build, copy_sources, fresh_interpreter, module_names, run_python, source_files

KERNELS = "adjcomp.runtime.kernels.triton"  # left out where every module is imported: Triton is there on Linux only


def installed_files(wheel: Path) -> list[str]:
    """The wheel's files without its metadata."""
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", copy_sources(folder / "source"), folder / "out")


def test_the_wheel_installs_adjcomp_alone(wheel: Path) -> None:
    names = installed_files(wheel)
    assert {name.split("/")[0] for name in names} == {"adjcomp"}
    assert any(name.startswith("adjcomp/passes/") for name in names)
    assert any(name.startswith("adjcomp/runtime/") for name in names)


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    expected = {"adjcomp/py.typed"}
    for folder, prefix in (("adjcomp", ""), ("passes", "adjcomp/"), ("runtime", "adjcomp/")):
        for pattern in ("*.py", "*.cpp", "*.h", "*.json"):
            expected |= {prefix + file.relative_to(ROOT).as_posix() for file in source_files(folder, pattern)}
    assert set(installed_files(wheel)) == expected


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", copy_sources(tmp_path / "source"), tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert installed_files(build("wheel", unpacked, tmp_path / "out")) == installed_files(wheel)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installation_imports_every_module(kind: str, tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    archive = zipfile.ZipFile(build(kind, source, tmp_path / "out"))
    archive.extractall(fresh_interpreter(tmp_path / "environment"))
    wanted = [name for name in module_names() if not name.startswith(KERNELS) and not name.endswith("__main__")]
    code = f"""
import importlib
for name in {wanted!r}:
    importlib.import_module(name)
import adjcomp
print(adjcomp.__file__)
"""
    done = run_python(code, tmp_path / "environment" / "bin" / "python", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    origin = Path(done.stdout.strip())
    assert origin.is_relative_to(source if kind == "editable" else tmp_path / "environment")


def test_a_module_has_one_name_in_a_checkout() -> None:
    code = """
import sys, adjcomp.passes, adjcomp.runtime
print([name for name in sys.modules if name.split(".")[0] in ("passes", "runtime")])
"""
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr
