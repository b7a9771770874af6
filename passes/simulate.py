"""What a plan's actions would do to memory and time: peak bytes by device and kind, and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.kinds import KIND_NAMES, by_kind
from adjcomp.ir.plan import Share
from adjcomp.ir.values import Kind
from adjcomp.passes.away import HostTimes
from adjcomp.passes.beside import Beside
from adjcomp.passes.lanes import Lanes
from adjcomp.passes.recipes import Recipes


@dataclass(frozen=True)
class Totals:
    """What a plan needs."""

    peak_bytes: dict[str, int]  # device name -> most bytes live at any action
    bytes_by_kind: dict[str, dict[str, int]]  # device name -> kind -> bytes at the first action of the peak
    seconds: float
    host_peak_bytes: dict[str, int] = field(default_factory=dict)  # device name -> most bytes offloaded at a time


def simulate(costs: StackCosts, shares: Sequence[Share], actions: Sequence[Action]) -> Totals:
    """Peak bytes per device and seconds of `actions` run one after the other, with copies to and from a host beside them."""
    recipes = Recipes(costs)
    own: list[Sequence[Action]] = [actions]
    if len(shares) > 1:
        own = [[] for _ in shares]
        for action in actions:
            own[action.device].append(action)  # type: ignore[attr-defined]
    peaks, kinds = {}, {}
    seconds: list[float] = []
    for share, mine in zip(shares, own, strict=True):
        beside = Beside(costs, share, alone=len(shares) == 1)
        peaks[share.name], kinds[share.name] = _device_peak(recipes, share, mine, seconds, beside)
    if len(shares) == 1 and shares[0].host is not None:
        timed = HostTimes(costs, shares[0].host).run(actions)
        return Totals(peaks, kinds, timed.now, {shares[0].name: timed.peak})
    return Totals(peaks, kinds, math.fsum(seconds))


def _device_peak(
    recipes: Recipes, share: Share, actions: Sequence[Action], seconds: list[float], beside: Beside
) -> tuple[int, dict[str, int]]:
    """Peak bytes of one device and their kinds at the first action that reaches it; appends the seconds of each action."""
    live: dict[Kind, int] = dict.fromkeys(KIND_NAMES, 0)
    held = 0
    peak = beside.size  # of a device without work
    best: tuple[dict[Kind, int], dict[str, int], int] = (dict(live), {}, 0)
    lanes: Lanes | None = None  # between a Fork and its Join
    at_fork: tuple[int, dict[Kind, int]] = (0, {})
    for action in actions:
        beside.before(action)
        if type(action) is Fork:
            lanes, at_fork = Lanes(recipes), (held, dict(live))
        elif type(action) is Join:
            lanes = None
        recipe, _ = recipes.of(action)
        change = recipe.made_bytes
        gone = [(value[0], recipes.size(value)) for value in action.frees]
        for _, size in gone:
            change -= size
        if lanes is None:
            base, extra, below = held, recipe.workspace if recipe.workspace > change else change, live
        else:
            lanes.add(action)
            (base, below), extra = at_fork, lanes.extra_bytes
        if beside.size + base + extra > peak:
            peak, best = beside.size + base + extra, (dict(below), dict(beside.turned), extra)
        for kind, size in recipe.made:
            live[kind] += size
        for kind, size in gone:
            live[kind] -= size
        held += change
        beside.after(action)
        seconds.append(recipe.seconds)
    return peak, by_kind(share.resident_bytes, best[1], best[0], best[2])
