"""Tracing without torch's own log lines about what it raises."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch logs what it raises with a traceback of its own; what can't be traced is told once, by the CaptureError."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.CRITICAL))
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
