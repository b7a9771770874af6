"""The folder of things that can be made again (compiled kernels, calibrations): private, owned by this user, safe to delete."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path

CACHE_VARIABLE = "ADJCOMP_CACHE_DIR"


def is_private(path: Path) -> bool:
    """Whether `path` belongs to this user and nobody else may write to it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_root() -> Path:
    """`$ADJCOMP_CACHE_DIR`, else `~/.cache/adjcomp`."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "adjcomp"


@cache
def _temporary_root() -> Path:
    return Path(tempfile.mkdtemp(prefix="adjcomp-"))


def private_folder(name: str) -> Path:
    """The folder `name` in the cache, made with mode 0700.

    Where it can't be made, isn't this user's or can't be made private, a temporary folder of this process takes its place.
    """
    folder = cache_root() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
            if os.access(folder, os.W_OK):
                return folder
    except OSError:
        pass  # read-only or missing home: the temporary folder below serves this process
    folder = _temporary_root() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or none, mode 0600."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)
