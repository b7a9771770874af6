"""What a plan's actions would do to memory and time: bytes at every action, by device and kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.kinds import KIND_NAMES, by_kind
from adjcomp.ir.plan import Share, total
from adjcomp.ir.values import Kind, Value, value_bytes


@dataclass(frozen=True)
class Totals:
    """What a plan needs."""

    peak_bytes: dict[str, int]  # device name -> most bytes live at any action
    bytes_by_kind: dict[str, dict[str, int]]  # device name -> kind -> bytes at the first action of the peak
    seconds: float


def simulate(costs: StackCosts, shares: Sequence[Share], actions: Sequence[Action]) -> Totals:
    """Peak bytes per device and seconds of `actions` run one after the other."""
    peaks, kinds = {}, {}
    for device, share in enumerate(shares):
        peaks[share.name], kinds[share.name] = _device_peak(costs, share, [a for a in actions if a.device == device])
    return Totals(peaks, kinds, math.fsum([action.seconds(costs) for action in actions]))


def workspace_bytes(costs: StackCosts, action: Action) -> int:
    """Extra peak while `action` runs, over what was live when it started."""
    match action:
        case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
            tile = costs.tile(layer, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Loss(chunk=chunk, keep=keep):
            tile = costs.tile(costs.head, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Adjoint(layer=layer, chunk=chunk):
            return costs.tile(layer, chunk).adjoint_workspace_bytes
        case HeadVjp(chunk=chunk):
            return costs.tile(costs.head, chunk).adjoint_workspace_bytes
        case Publish(layer=layer):
            return costs.publish_bytes[layer]
        case Start() | Turn():
            return sum(value_bytes(costs, value) for value in action.writes(costs))
    raise TypeError(f"no workspace rule for {type(action).__name__}")


def _device_peak(costs: StackCosts, share: Share, actions: Sequence[Action]) -> tuple[int, dict[str, int]]:
    """Peak bytes of one device and their kinds at the first action that reaches it."""
    sizes: dict[Value, int] = {}
    live: dict[Kind, int] = dict.fromkeys(KIND_NAMES, 0)
    fixed, held, peak, turned = total(share.resident_bytes), 0, 0, False
    best: tuple[dict[Kind, int], bool, int] = (dict(live), False, 0)
    for action in actions:
        if isinstance(action, Turn):
            turned, fixed = True, fixed + total(share.turn_bytes)
        made = [(value.kind, _size(costs, value, sizes)) for value in action.writes(costs)]
        gone = [(value.kind, _size(costs, value, sizes)) for value in action.frees]
        change = sum(size for _, size in made) - sum(size for _, size in gone)
        extra = max(workspace_bytes(costs, action), change)
        if fixed + held + extra > peak:
            peak, best = fixed + held + extra, (dict(live), turned, extra)
        for kind, size in made:
            live[kind] += size
        for kind, size in gone:
            live[kind] -= size
        held += change
    return peak, by_kind(share.resident_bytes, share.turn_bytes if best[1] else {}, best[0], best[2])


def _size(costs: StackCosts, value: Value, sizes: dict[Value, int]) -> int:
    """Bytes of `value`, remembered in `sizes`."""
    found = sizes.get(value)
    if found is None:
        found = sizes[value] = value_bytes(costs, value)
    return found
