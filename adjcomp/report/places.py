"""Which device has what, for the printed plan of several devices."""

from __future__ import annotations

from collections.abc import Sequence

from adjcomp.ir.actions import Forward, Loss
from adjcomp.ir.plan import Plan
from adjcomp.ir.transfers import Send
from adjcomp.ir.values import value_bytes
from adjcomp.units import format_bytes


def placement_lines(plan: Plan) -> list[str]:
    """A line for each device: its layers and chunks, the share of the step that it computes, and the bytes it sends."""
    costs = plan.costs
    layers: list[set[int]] = [set() for _ in plan.shares]
    chunks: list[set[int]] = [set() for _ in plan.shares]
    busy, sent = [0.0 for _ in plan.shares], [0 for _ in plan.shares]
    for action in plan.actions:
        device = action.device
        busy[device] += action.seconds(costs) / plan.shares[device].speed
        match action:
            case Forward(layer=layer, chunk=chunk):
                layers[device].add(layer)
                chunks[device].add(chunk)
            case Loss(chunk=chunk):
                layers[device].add(costs.head)
                chunks[device].add(chunk)
            case Send(value=value):
                sent[device] += value_bytes(costs, value)
    lines = ["Placement", f"  {'device':<14} {'layers':<10} {'chunks':<16} {'busy':>7}  {'sends':>10}"]
    for device, share in enumerate(plan.shares):
        at_work = 100 * busy[device] / plan.seconds if plan.seconds > 0 else 0.0
        places = f"{_span(sorted(layers[device])):<10} {_span(sorted(chunks[device])):<16}"
        lines.append(f"  {share.name:<14} {places} {at_work:>5.1f} %  {format_bytes(sent[device]):>10}")
    return lines


def _span(numbers: Sequence[int]) -> str:
    """First and last of evenly spaced numbers, with their distance where it isn't one: 0-9, or 1-13 by 4."""
    if not numbers:
        return "none"
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    return f"{numbers[0]}-{numbers[-1]}" + (f" by {step}" if step > 1 else "")
