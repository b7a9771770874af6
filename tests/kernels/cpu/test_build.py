"""The compiled kernels' cache: private, checked, made again when broken; and a working answer without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adjcomp.runtime import cache
from adjcomp.runtime.kernels.cpu import build, native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})


def test_a_library_is_compiled_once(folder: Path) -> None:
    build.library("counter_uniform")
    (made,) = folder.glob("*.so")
    written = made.stat().st_mtime_ns
    build.library("counter_uniform")
    assert made.stat().st_mtime_ns == written


def test_the_cache_is_private(folder: Path) -> None:
    build.library("counter_uniform")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(not path.stat().st_mode & 0o022 for path in folder.iterdir())


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a library")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [overwrite, truncate, Path.unlink])
def test_a_broken_library_is_made_again(folder: Path, damage: Callable[[Path], None]) -> None:
    build.library("counter_uniform")
    (made,) = folder.glob("*.so")
    content = made.read_bytes()
    damage(made)
    build.library("counter_uniform")
    assert len(made.read_bytes()) == len(content)


def test_a_library_that_others_may_write_is_made_again(folder: Path) -> None:
    build.library("counter_uniform")
    (made,) = folder.glob("*.so")
    made.chmod(0o666)
    build.library("counter_uniform")
    assert cache.is_private(made)


def test_a_folder_that_cannot_be_made_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    found = cache.private_folder("kernels")
    assert tmp_path not in found.parents
    assert found.is_dir()


def test_without_a_compiler_there_is_one_warning_and_the_same_answer(tmp_path: Path) -> None:
    code = (
        "import warnings, torch, adjcomp\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    h, _ = adjcomp.ops.linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1))\n"
        "    adjcomp.ops.causal_conv1d(torch.ones(1, 3, 2), torch.ones(2, 2))\n"
        "print(h.flatten().tolist(), [str(w.message) for w in seen if w.category is RuntimeWarning])"
    )
    done = run(code, PATH=str(tmp_path), CXX="", ADJCOMP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.stdout.startswith("[1.0, 1.5, 1.75] ['adjcomp runs its recurrences in torch"), done.stderr
    assert done.stdout.count("no C++ compiler") == 1


def test_a_compiler_that_fails_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho cannot do that >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(broken))
    with pytest.raises(build.BuildError, match=r"could not compile counter_uniform\.cpp: cannot do that"):
        build.library("counter_uniform")


def test_checkpoint_intervals_agree_with_the_sources() -> None:
    from adjcomp.ops import dual, selective

    assert native.required("selective_scan").checkpoint_steps() == selective.CHECKPOINT_STEPS
    assert native.required("ssd").checkpoint_steps() == dual.CHECKPOINT_STEPS


def test_loading_leaves_subnormal_numbers_alone() -> None:
    for source in build.SOURCES.glob("*.cpp"):
        native.required(source.stem)
    tiny = torch.tensor([1e-40])
    assert (tiny * 0.5).item() > 0
    assert float.fromhex("0x1p-1074") > 0


def test_only_one_openmp_runtime_is_loaded() -> None:
    code = (
        "import torch, adjcomp, re\n"
        "adjcomp.ops.linear_scan(torch.rand(2, 64, 512), torch.rand(2, 64, 512))\n"
        "print(len(set(re.findall(r'/\\S*lib(?:gomp|iomp5|omp)[^/\\s]*\\.so\\S*', open('/proc/self/maps').read()))))"
    )
    assert run(code).stdout.strip() == "1"
