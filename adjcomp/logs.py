"""What adjcomp says on stderr while it traces, calibrates and plans: the level that `ADJCOMP_LOGS` names."""

from __future__ import annotations

import logging
import os

LOGGER = logging.getLogger("adjcomp")


def configure(level: str) -> None:
    """Print records of adjcomp's logger from `level` on; ValueError for what is no level of Python's logging."""
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ValueError(f"ADJCOMP_LOGS is {level!r}; known levels: {', '.join(name.lower() for name in known if known[name])}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("adjcomp: %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(known[level.upper()])
    LOGGER.propagate = False  # a root handler would print every record a second time


if chosen := os.environ.get("ADJCOMP_LOGS"):
    configure(chosen)
