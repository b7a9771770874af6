"""Whether a plan's time ranges may be joined by summaries."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from adjcomp.options import Options
from adjcomp.passes.cost import FEWEST_RANGES
from adjcomp.passes.joinable import NotJoinable
from adjcomp.passes.joining import JoinGraphs
from adjcomp.passes.pipeline import Captured
from adjcomp.passes.split import Split

log = logging.getLogger("adjcomp")


def joins_of(captured: Captured, splits: Sequence[Split | None], options: Options, devices: int) -> tuple[JoinGraphs, ...]:
    """What joins the ranges of so many devices, by template; nothing where that isn't wanted, or can't be.

    Raises:
        ValueError: it is asked for, and some layer's states can't be joined.
    """
    if devices < FEWEST_RANGES or options.summaries is False or options.placement not in (None, "time"):
        return ()
    found = captured.joins(splits)
    if not isinstance(found, NotJoinable):
        return found
    if options.summaries:
        raise ValueError(f"summaries=True, but ranges of time can't be joined: {found.reason}")
    log.info("ranges of time hand their states on: %s", found.reason)
    return ()
