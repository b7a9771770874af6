"""Say what takes long: the first call of a shape captures, times and plans before anything trains."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

log = logging.getLogger("adjcomp")


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Log `what` and how long it took; on a terminal, also show it on one line of stderr while it runs."""
    started = time.perf_counter()
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"adjcomp: {what} …")
        sys.stderr.flush()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        if shown:
            sys.stderr.write(f"\radjcomp: {what}, {seconds:.1f} s \n")
        log.info("%s took %.2f s", what, seconds)
