"""What a plan's actions would do to memory and time: peak bytes by device and kind, and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Free, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.kinds import KIND_NAMES, by_kind
from adjcomp.ir.plan import Share, total
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value, value_bytes


@dataclass(frozen=True)
class Totals:
    """What a plan needs."""

    peak_bytes: dict[str, int]  # device name -> most bytes live at any action
    bytes_by_kind: dict[str, dict[str, int]]  # device name -> kind -> bytes at the first action of the peak
    seconds: float


def simulate(costs: StackCosts, shares: Sequence[Share], actions: Sequence[Action]) -> Totals:
    """Peak bytes per device and seconds of `actions` run one after the other."""
    known = Known(costs)
    own: list[list[Action]] = [[] for _ in shares]
    for action in actions:
        own[action.device].append(action)
    peaks, kinds = {}, {}
    for share, mine in zip(shares, own, strict=True):
        peaks[share.name], kinds[share.name] = _device_peak(known, share, mine)
    return Totals(peaks, kinds, math.fsum([known.effect(action).seconds for action in actions]))


def workspace_bytes(costs: StackCosts, action: Action) -> int:
    """Extra peak while `action` runs, over what was live when it started."""
    match action:
        case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
            tile = costs.tile(layer, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Loss(chunk=chunk, keep=keep):
            tile = costs.tile(costs.head, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Advance(layer=layer, chunk=chunk):
            return costs.tile(layer, chunk).forward_workspace_bytes
        case Adjoint(layer=layer, chunk=chunk):
            return costs.tile(layer, chunk).adjoint_workspace_bytes
        case HeadVjp(chunk=chunk):
            return costs.tile(costs.head, chunk).adjoint_workspace_bytes
        case Publish(layer=layer):
            return costs.publish_bytes[layer]
        case Free() | Send() | Sum() | SumTied():
            return 0
        case Start() | Turn() | Receive():
            return sum(value_bytes(costs, value) for value in action.writes(costs))
    raise TypeError(f"no workspace rule for {type(action).__name__}")


@dataclass(frozen=True)
class Effect:
    """What one action adds."""

    made: tuple[tuple[Kind, int], ...]  # kind and bytes of what it writes
    made_bytes: int
    workspace: int
    seconds: float


class Known:
    """Effects and sizes that were looked up before: those of inner chunks are all alike."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self.last = costs.chunk_count - 1
        self._effects: dict[tuple[object, ...], Effect] = {}
        self._sizes: dict[tuple[Kind, int, bool], int] = {}

    def effect(self, action: Action) -> Effect:
        """The effect of `action`."""
        match action:
            case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
                key: tuple[object, ...] = (type(action), layer, keep, chunk == self.last)
            case Adjoint(layer=layer, chunk=chunk) | Advance(layer=layer, chunk=chunk):
                key = (type(action), layer, chunk == self.last)
            case _:
                key = (action,)
        found = self._effects.get(key)
        if found is None:
            made = tuple((value.kind, value_bytes(self.costs, value)) for value in action.writes(self.costs))
            size = sum(size for _, size in made)
            found = Effect(made, size, workspace_bytes(self.costs, action), action.seconds(self.costs))
            self._effects[key] = found
        return found

    def size(self, value: Value) -> int:
        """Bytes of `value`."""
        key = (value[0], value[1], value[2] == self.last)
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = value_bytes(self.costs, value)
        return found


def _device_peak(known: Known, share: Share, actions: Sequence[Action]) -> tuple[int, dict[str, int]]:
    """Peak bytes of one device and their kinds at the first action that reaches it."""
    live: dict[Kind, int] = dict.fromkeys(KIND_NAMES, 0)
    fixed, held, peak, turned = total(share.resident_bytes), 0, 0, False
    best: tuple[dict[Kind, int], bool, int] = (dict(live), False, 0)
    for action in actions:
        if isinstance(action, Turn):
            turned, fixed = True, fixed + total(share.turn_bytes)
        effect = known.effect(action)
        gone = [(value[0], known.size(value)) for value in action.frees]
        change = effect.made_bytes
        for _, size in gone:
            change -= size
        extra = max(effect.workspace, change)
        if fixed + held + extra > peak:
            peak, best = fixed + held + extra, (dict(live), turned, extra)
        for kind, size in effect.made:
            live[kind] += size
        for kind, size in gone:
            live[kind] -= size
        held += change
    return peak, by_kind(share.resident_bytes, share.turn_bytes if best[1] else {}, best[0], best[2])
