"""Constructive plans: a feasible choice at once, good enough to stand when the search has no time.

First every column takes the option that leaves the least behind and fits. Then the columns, last chunk first, spend what is
left of the budget: what the last chunks hold is released first, so it is in the way of the fewest others. Where there are very
many columns, blocks of neighbours decide together: w columns with one option leave w D and need (w - 1) D + need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adjcomp.passes.schedule.bound import Bound
from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.instance import Instance

SCALES = (1.0, 0.97, 0.7)  # multiples of the prices that are tried
BLOCKS = 512  # blocks of a long sequence
SINGLES = 64  # columns at its end that decide alone


@dataclass(frozen=True)
class Choice:
    """One option index a column, and the time of them all."""

    options: tuple[int, ...]
    ticks: int


@dataclass(frozen=True)
class _Block:
    """Consecutive columns of one kind that take one option."""

    kind: int
    first: int
    size: int


def greedy(instance: Instance, budget: int, bounds: Sequence[Bound]) -> Choice:
    """The best of several constructions, guided by the prices of `bounds` and by prices somewhat below them.

    Each ends with a pass at price zero, which spends what is left and makes no column slower.
    """
    lean = lean_choice(instance, budget)
    best = improve(instance, budget, lean, None, 0.0)
    for bound in bounds:
        for scale in SCALES:
            priced = improve(instance, budget, lean, bound, scale)
            best = min(best, improve(instance, budget, priced, None, 0.0), key=lambda choice: choice.ticks)
    return best


def least_need(instance: Instance) -> Ints:
    """`least[c]`: the smallest budget under which columns c … C-1 can run when nothing is left by the columns before; shape (C,).

    least[c] = min over options of max(need, D + least[c + 1]): what the columns after c need lies on top of what c leaves. Once
    the smallest D attains it, it does so for all inner columns before, because least only grows.
    """
    kinds = instance.kinds()
    least = np.zeros(len(kinds), np.int64)
    least[-1] = instance.menus[kinds[-1]].need.min()
    c = len(kinds) - 2
    while c >= 0:
        menu, rest = instance.menus[kinds[c]], int(least[c + 1])
        least[c] = np.maximum(menu.need, menu.left + rest).min()
        floor = int(menu.left.min())
        if kinds[c] == 1 and least[c] == floor + rest:
            least[1:c] = least[c] + floor * np.arange(c - 1, 0, -1)
            c = 0
        else:
            c -= 1
    return least


def lean_choice(instance: Instance, budget: int) -> Choice:
    """For each column, first to last, the option that leaves the least behind, the fastest of those, so that the rest still fits.

    Feasible whenever `budget` is at least `least_need`[0], because each column keeps the rest feasible.
    """
    least = np.append(least_need(instance), 0)
    found = _lean(instance, budget, least, _blocks(instance, BLOCKS))
    if found is None:
        found = _lean(instance, budget, least, _blocks(instance, instance.costs.chunk_count))
    if found is None:
        raise ValueError(f"no choice fits {budget} bytes; the least is {least[0]}")
    return found


def _lean(instance: Instance, budget: int, least: Ints, blocks: Sequence[_Block]) -> Choice | None:
    """The lean choice by blocks; None where a block has no option that all of its columns can take."""
    used, options, ticks = 0, [], 0
    for block in blocks:
        menu, after = instance.menus[block.kind], block.first + block.size
        fits = used + menu.need + (block.size - 1) * menu.left <= budget
        if after < instance.costs.chunk_count:
            fits &= used + block.size * menu.left + least[after] <= budget
        index = np.flatnonzero(fits)
        if not len(index):
            return None
        best = int(index[np.lexsort((menu.ticks[index], menu.left[index]))[0]])
        options += [best] * block.size
        ticks += block.size * int(menu.ticks[best])
        used += block.size * int(menu.left[best])
    return Choice(tuple(options), ticks)


def improve(instance: Instance, budget: int, start: Choice, bound: Bound | None, scale: float) -> Choice:
    """Change `start` from the last column to the first, at `scale` times the prices of `bound` (None: at price zero).

    A block may change to any option that fits under what the columns before it leave now, and whose additional bytes fit under
    every column after it. It takes the one with the least t + mu need + M D: at the prices of a good bound the budget goes
    where it saves most.
    """
    options = np.array(start.options, np.int64)
    columns = np.array(instance.kinds())
    left = np.zeros(len(columns), np.int64)
    for kind, menu in enumerate(instance.menus):
        left[columns == kind] = menu.left[options[columns == kind]]
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(left)))
    prices, left_prices = (
        (bound.prices * scale, bound.left_prices * scale) if bound else (np.zeros(len(left)), np.zeros(len(left)))
    )
    slack, ticks = budget, 0
    for block in reversed(_blocks(instance, BLOCKS)):
        menu, first, end = instance.menus[block.kind], block.first, block.first + block.size
        last = end == len(columns)
        change = block.size * menu.left - (before[end] - before[first])
        need = menu.need + (block.size - 1) * menu.left
        fits = np.flatnonzero((before[first] + need <= budget) & ((change <= slack) | last))
        worth = menu.ticks[fits] + prices[end - 1] * menu.need[fits] + left_prices[end - 1] * menu.left[fits]
        kept = options[first:end]
        if len(fits):
            best = int(fits[np.argmin(worth)])
            kept = np.full(block.size, best)
            # The columns before may raise what lies under this block and under all after it by no more than this.
            slack = min(slack - (0 if last else int(change[best])), budget - int(before[first]) - int(need[best]))
        else:
            own = np.concatenate(([0], np.cumsum(menu.left[kept])[:-1])) + menu.need[kept]
            slack = min(slack, budget - int(before[first]) - int(own.max()))
        options[first:end] = kept
        ticks += int(menu.ticks[kept].sum())
    return Choice(tuple(options.tolist()), ticks)


def in_order(instance: Instance, choice: Choice) -> tuple[int, ...]:
    """The options of `choice`, inner columns by falling need - D, which fits wherever another order does."""
    kinds, menu = instance.kinds(), instance.menus[1]
    inner = [option for option, kind in zip(choice.options, kinds, strict=True) if kind == 1]
    inner.sort(key=lambda option: (int(menu.left[option] - menu.need[option]), option))
    first = choice.options[:1] if kinds[0] == 0 else ()
    return (*first, *inner, choice.options[-1])


def _blocks(instance: Instance, most: int) -> list[_Block]:
    """All columns, in about `most` blocks; up to that many columns, each is its own."""
    kinds = instance.kinds()
    inner = [c for c, kind in enumerate(kinds) if kind == 1]
    size = max(1, -(-(len(inner) - SINGLES) // most))
    together = inner[: max(0, len(inner) - SINGLES) // size * size] if size > 1 else []
    blocks = [_Block(0, 0, 1)] if kinds[0] == 0 else []
    blocks += [_Block(1, c, size) for c in together[::size]]
    blocks += [_Block(1, c, 1) for c in inner[len(together) :]]
    return [*blocks, _Block(2, len(kinds) - 1, 1)]
