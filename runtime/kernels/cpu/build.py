"""Compiles a C++ source of this folder into a shared library, once per source, compiler, flags and CPU.

The result lies in a private cache folder beside its digest; a file that is broken, incomplete or not this user's is made again.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from adjcomp.runtime.cache import is_private, private_folder, write_atomically

SOURCES = Path(__file__).parent

COMPILERS = ("g++", "c++", "clang++")
# Not -ffast-math: it breaks NaN and infinity, and loading such a library makes the whole process flush subnormals.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
NATIVE = "-march=native"
THREADS = "-fopenmp"


class BuildError(RuntimeError):
    """No compiler was found, or none of the flag sets compiled the source."""


@cache
def compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else the first of g++, c++, clang++. Raises BuildError where there is none."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler (g++, c++ or clang++, or $CXX) was found")


@cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout


@cache
def cpu_model() -> str:
    """What identifies the CPU's instruction set: architecture, model and feature flags."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    wanted = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(wanted)])


@cache
def _openmp_library() -> str | None:
    """The OpenMP runtime that torch has loaded, so that kernels share its threads and no second one comes in."""
    maps = Path("/proc/self/maps")
    found = re.findall(r"\s(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read_text()) if maps.exists() else []
    return found[0] if found else None


def _key(source: Path, text: bytes) -> str:
    parts = [text, *(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))]
    parts += [part.encode() for part in (*FLAGS, compiler(), _compiler_version(), cpu_model(), _openmp_library() or "")]
    return f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}"


def _compile(source: Path, target: Path) -> None:
    """Compile with OpenMP for this CPU; where that fails, without one and then without the other."""
    failure = ""
    for extra in ((NATIVE, THREADS), (THREADS,), (NATIVE,), ()):
        linked = [_openmp_library() or THREADS] if THREADS in extra else []
        unit = target.with_suffix(".o")
        steps = [
            [compiler(), *FLAGS, *extra, "-c", str(source), "-o", str(unit)],
            [compiler(), "-shared", str(unit), *linked, "-o", str(target)],
        ]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                failure = done.stderr
                break
        else:
            return
    raise BuildError(f"{compiler()} could not compile {source.name}: {failure[-2000:]}")


def _intact(library: Path, digest: Path) -> bool:
    """Whether a cached library is this user's and has the bytes that were written."""
    if not library.exists() or not digest.exists() or not is_private(library) or not is_private(digest):
        return False
    return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()


def library(name: str) -> ctypes.CDLL:
    """Load `<name>.cpp` of this folder, compiling it if need be (a second or two). Raises BuildError."""
    source = SOURCES / f"{name}.cpp"
    folder, key = private_folder("kernels"), _key(source, source.read_bytes())
    target, digest = folder / f"{key}.so", folder / f"{key}.sha256"
    if not _intact(target, digest):
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may start at once: one compiles
            if not _intact(target, digest):
                _build(source, target, digest)
    return ctypes.CDLL(str(target))


def _build(source: Path, target: Path, digest: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        _compile(source, made)
        content = made.read_bytes()
    digest.unlink(missing_ok=True)
    write_atomically(target, content)
    write_atomically(digest, hashlib.sha256(content).hexdigest().encode())
