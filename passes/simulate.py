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
    """Peak bytes of one device and their kinds at the first action that reaches it; appends the seconds of each action.

    Plans have a million actions: the kinds are added up only once it is known where the peak is.
    """
    held, peak = 0, beside.size  # of a device without work
    best: tuple[int, dict[str, int], int] = (0, {}, 0)  # actions before, what the Turn has brought, bytes of the action's own
    lanes: Lanes | None = None  # between a Fork and its Join
    fork = held_at_fork = 0
    recipe_of, size_of = recipes.of, recipes.size
    for index, action in enumerate(actions):
        beside.before(action)
        if type(action) is Fork:
            lanes, fork, held_at_fork = Lanes(recipes), index, held
        elif type(action) is Join:
            lanes = None
        recipe = recipe_of(action)[0]
        change = recipe.made_bytes
        for value in action.frees:
            change -= size_of(value)
        if lanes is None:
            base, extra, before = held, recipe.workspace if recipe.workspace > change else change, index
        else:
            lanes.add(action)
            base, extra, before = held_at_fork, lanes.extra_bytes, fork
        if beside.size + base + extra > peak:
            peak, best = beside.size + base + extra, (before, dict(beside.turned), extra)
        held += change
        beside.after(action)
        seconds.append(recipe.seconds)
    return peak, by_kind(share.resident_bytes, best[1], _live_after(recipes, actions[: best[0]]), best[2])


def _live_after(recipes: Recipes, actions: Sequence[Action]) -> dict[Kind, int]:
    """Bytes that are live after `actions`, by kind."""
    live: dict[Kind, int] = dict.fromkeys(KIND_NAMES, 0)
    for action in actions:
        for kind, size in recipes.of(action)[0].made:
            live[kind] += size
        for value in action.frees:
            live[value[0]] -= recipes.size(value)
    return live
