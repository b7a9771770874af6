"""Constructive plans: a feasible choice at once, good enough to stand when the search has no time.

First every column takes the fastest option that leaves the least behind and fits. Then the columns, last chunk first, spend
what is left of the budget: what the last chunks hold is released first, so it is in the way of the fewest others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.instance import Instance, Menu


@dataclass(frozen=True)
class Choice:
    """One option index a column, and the time of them all."""

    options: tuple[int, ...]
    ticks: int


def least_need(instance: Instance, menus: Sequence[Menu]) -> Ints:
    """`least[c]`: the smallest budget under which columns c … C-1 can run when nothing is left by the columns before; shape (C,).

    least[c] = min over options of max(need, D + least[c + 1]): what the columns after c need lies on top of what c leaves.
    """
    kinds = instance.kinds()
    least = np.zeros(len(kinds), np.int64)
    rest = 0
    for c in range(len(kinds) - 1, -1, -1):
        menu = menus[kinds[c]]
        rest = int((np.maximum(menu.need, menu.left + rest) if c < len(kinds) - 1 else menu.need).min())
        least[c] = rest
    return least


def lean_choice(instance: Instance, budget: int) -> Choice:
    """The fastest option for each column, first to last, that leaves as little behind as the columns after it allow at best.

    Feasible whenever `budget` is at least `least_need`[0], because each column keeps the rest feasible.
    """
    kinds, least = instance.kinds(), least_need(instance, instance.menus)
    used, options, ticks = 0, [], 0
    for c, kind in enumerate(kinds):
        menu = instance.menus[kind]
        after = used + menu.left + (least[c + 1] if c + 1 < len(kinds) else 0)
        fits = np.flatnonzero((used + menu.need <= budget) & ((after <= budget) | (c + 1 == len(kinds))))
        best = int(fits[np.lexsort((menu.ticks[fits], menu.left[fits]))[0]])
        options.append(best)
        ticks += int(menu.ticks[best])
        used += int(menu.left[best])
    return Choice(tuple(options), ticks)


def greedy(instance: Instance, budget: int, price: float) -> Choice:
    """Improve the lean choice from the last column to the first; `price` is ticks per byte left behind.

    A column may change to any option that fits under what the columns before it leave now, and whose additional bytes fit under
    every column after it. It takes the one with the least ticks + price × D: with the price of the bound's dual this spends the
    budget where it saves most.
    """
    kinds, lean = instance.kinds(), lean_choice(instance, budget)
    options = list(lean.options)
    before = np.concatenate(([0], np.cumsum([instance.menus[k].left[o] for k, o in zip(kinds, options, strict=True)])))
    slack, ticks = budget, 0
    for c in range(len(kinds) - 1, -1, -1):
        menu, old = instance.menus[kinds[c]], options[c]
        extra = menu.left - menu.left[old]
        fits = np.flatnonzero((before[c] + menu.need <= budget) & ((extra <= slack) | (c == len(kinds) - 1)))
        worth = menu.ticks[fits] + (price * menu.left[fits] if c < len(kinds) - 1 else 0)
        best = int(fits[np.argmin(worth)])
        options[c] = best
        ticks += int(menu.ticks[best])
        # The columns before c may raise what lies under c and under all after it by no more than this.
        slack = min(slack - (int(extra[best]) if c < len(kinds) - 1 else 0), budget - int(before[c]) - int(menu.need[best]))
    return Choice(tuple(options), ticks)
