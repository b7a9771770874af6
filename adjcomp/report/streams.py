"""What runs side by side on the streams of one device, for the printed plan."""

from __future__ import annotations

from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.plan import Plan
from adjcomp.units import format_seconds


def stream_lines(plan: Plan) -> list[str]:
    """A line for plans that use several streams: how many, how often, and the step if streams never slowed each other."""
    forks = sum(isinstance(action, Fork) for action in plan.actions)
    if not forks:
        return []
    most = 1 + max(action.stream for action in plan.actions)
    return [
        f"  streams  up to {most} side by side, {forks} times; {format_seconds(overlapped_seconds(plan))} if none slowed another "
        "(predicted: they share the device's speed)"
    ]


def overlapped_seconds(plan: Plan) -> float:
    """Seconds of a step on one device whose streams don't slow each other: the longest stream of every stretch."""
    seconds, busy, forked = 0.0, {0: 0.0}, False
    for action in plan.actions:
        if isinstance(action, Fork | Join):
            seconds += max(busy.values())
            busy, forked = {0: 0.0}, isinstance(action, Fork)
        stream = action.stream if forked else 0
        busy[stream] = busy.get(stream, 0.0) + action.seconds(plan.costs)
    return seconds + max(busy.values())
