"""The loop order of a plan for one device, read off its actions."""

from __future__ import annotations

from adjcomp.ir.actions import Forward, Loss
from adjcomp.ir.plan import Plan


def segments_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """First and last layer of the segments that all chunks go through one after the other; one of all layers: time-major.

    The first chunk stops after each segment, and goes on when the others are there.
    """
    found: list[tuple[int, int]] = []
    first, layer = 0, -1
    for action in plan.actions if len(plan.shares) == 1 else ():
        if isinstance(action, Loss) and action.chunk == 0:
            break
        if not isinstance(action, Forward):
            continue
        if action.chunk == 0:
            layer = action.layer
        elif layer >= first:
            found.append((first, layer))
            first = layer + 1
    return (*found, (first, plan.costs.head))
