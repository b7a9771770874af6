"""The loop order, where it isn't the usual one."""

from __future__ import annotations

from adjcomp.ir.order import segments_of
from adjcomp.ir.plan import Plan

MOST_SEGMENTS = 6  # that are named


def order_lines(plan: Plan) -> list[str]:
    """A line for a plan that takes all chunks through some layers before it comes to the next."""
    segments = segments_of(plan)
    if len(segments) == 1:
        return []
    names = ["stem" if k == 0 else "head" if k == plan.costs.head else str(k) for k in range(plan.costs.head + 1)]
    ranges = [names[a] if a == b else f"{names[a]} to {names[b]}" for a, b in segments[:MOST_SEGMENTS]]
    more = f", … ({len(segments)} in all)" if len(segments) > MOST_SEGMENTS else ""
    return [f"  order    layer-major: all chunks through layers {', then '.join(ranges)}{more}; back likewise"]
