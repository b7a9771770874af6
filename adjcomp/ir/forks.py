"""Actions that begin and end a stretch in which several streams of a device run side by side.

Between a `Fork` and its `Join` every stream runs its own actions in the plan's order, and nothing is promised about the order
of actions of different streams. So no action may read what another stream writes or drops in the meantime, and two streams
never add to the same gradient. Memory is counted for the worst order: what was live at the Fork stays until the Join, and every
stream is at its own peak at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from adjcomp.ir.actions import Mark


@dataclass(frozen=True, slots=True)
class Fork(Mark):
    """Read as: from here to the Join streams run side by side; each begins when everything before has ended."""


@dataclass(frozen=True, slots=True)
class Join(Mark):
    """Read as: wait for all streams, then drop what several of them read."""
