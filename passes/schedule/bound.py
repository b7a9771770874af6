"""A lower bound on the time of every choice, from a Lagrangian relaxation.

Two facts hold for each choice that fits the budget B, with D >= 0:
 1. the columns before c leave at least base[c], the sum of their smallest D, so column c's option has need <= B - base[c];
 2. the last column has sum of D over all columns before it + need <= B.
Keep 1 as it is, and take 2 into the objective with a price mu >= 0 (ticks per byte). What remains falls apart into columns:

    bound(mu) = sum over c < C-1 of min {t + mu D : need <= B - base[c]}  +  min {t + mu need : …}  -  mu B.

Every bound(mu) is a lower bound; bound is concave in mu, and the largest value is found by bisection on its slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adjcomp.passes.schedule.instance import Instance, Menu

ROUNDS = 80  # bisections of the price; each halves the interval


@dataclass(frozen=True)
class Bound:
    """A lower bound in ticks, and the price (ticks per byte) that proves it."""

    ticks: float
    price: float


class Relaxation:
    """The relaxed problem of one instance and budget, ready to be evaluated at any price."""

    def __init__(self, instance: Instance, budget: int) -> None:
        self.budget = budget
        kinds = instance.kinds()
        menus = instance.bound_menus
        floors = [int(menus[kind].left.min()) for kind in kinds]
        base = np.concatenate(([0], np.cumsum(np.array(floors[:-1], np.int64))))
        self.last = menus[kinds[-1]]
        self.last_fits = self.last.need <= budget - base[-1]
        self.groups: list[tuple[Menu, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for kind in sorted(set(kinds[:-1])):
            menu = menus[kind]
            rooms = budget - base[:-1][[k == kind for k in kinds[:-1]]]
            order = np.argsort(menu.need, kind="stable")
            counts, times = np.unique(np.searchsorted(menu.need[order], rooms, side="right"), return_counts=True)
            self.groups.append((menu, order, counts, times))

    @property
    def feasible(self) -> bool:
        """Whether every column has an option left; otherwise no choice fits the budget."""
        return bool(self.last_fits.any()) and all(counts.min() > 0 for _, _, counts, _ in self.groups)

    def at(self, price: float) -> tuple[float, float]:
        """(bound, slope) at `price`: ticks, and bytes over the budget of the relaxed choice."""
        worth = self.last.ticks[self.last_fits] + price * self.last.need[self.last_fits]
        best = int(np.argmin(worth))
        bound, used = float(worth[best]) - price * self.budget, int(self.last.need[self.last_fits][best])
        for menu, order, counts, times in self.groups:
            prices = (menu.ticks + price * menu.left)[order]
            lowest = np.minimum.accumulate(prices)
            first = np.maximum.accumulate(np.where(prices <= lowest, np.arange(len(prices)), 0))
            chosen = order[first[counts - 1]]
            bound += float(np.dot(times, (menu.ticks + price * menu.left)[chosen]))
            used += int(np.dot(times, menu.left[chosen]))
        return bound, float(used - self.budget)


def lower_bound(instance: Instance, budget: int) -> Bound | None:
    """The best bound of the relaxation; None when it proves that no choice fits `budget`."""
    relaxation = Relaxation(instance, budget)
    if not relaxation.feasible:
        return None
    best, slope = relaxation.at(0.0)
    if slope <= 0:
        return Bound(best, 0.0)
    low, high = 0.0, 1.0
    while relaxation.at(high)[1] > 0:
        low, high = high, high * 4
        if high > 1e30:
            return None
    price = high
    best = max(best, relaxation.at(high)[0])
    for _ in range(ROUNDS):
        middle = (low + high) / 2 if low > 0 else high / 16
        value, slope = relaxation.at(middle)
        if value > best:
            best, price = value, middle
        if slope > 0:
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return Bound(best, price)
