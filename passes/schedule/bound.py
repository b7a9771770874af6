"""Lower bounds on the time of every choice, from Lagrangian relaxations.

Let B be the budget. Two facts hold for each choice that fits it, because D >= 0:
 1. the columns before c leave at least base[c], the sum of their smallest D, so column c's option has need <= B - base[c];
 2. row c: sum of D over the columns before c + need of column c <= B.
Keep 1 as it is, and take the rows into the objective with prices mu[c] >= 0 (ticks per byte). What remains falls apart into
columns:

    bound(mu) = sum over c of min {t + mu[c] need + M[c] D : need <= B - base[c]}  -  B sum of mu,    M[c] = sum of mu[c'] over
    c' > c.

Every bound(mu) is a lower bound, whoever proposes mu. `single_row` prices the last row alone, by bisection on the slope of a
concave function; `passes.schedule.relaxation` proposes prices for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adjcomp.passes.schedule.instance import Instance, Menu

Floats = npt.NDArray[np.float64]
ROUNDS = 80  # bisections of the price; each halves the interval
BLOCK = 256  # columns evaluated at once


@dataclass(frozen=True)
class Bound:
    """A lower bound in ticks, and the prices that prove it."""

    ticks: float
    prices: Floats  # mu, ticks per byte, shape (C,)

    @property
    def left_prices(self) -> Floats:
        """M, the price of a byte left behind by each column; shape (C,)."""
        return np.concatenate((np.cumsum(self.prices[::-1])[::-1][1:], [0.0]))


def rooms(instance: Instance, budget: int) -> npt.NDArray[np.int64]:
    """B - base[c]: what column c may need at most; shape (C,)."""
    floors = [int(menu.left.min()) for menu in instance.bound_menus]
    before = np.array([floors[kind] for kind in instance.kinds()[:-1]], np.int64)
    return budget - np.concatenate((np.zeros(1, np.int64), np.cumsum(before)))


def worth(menu: Menu, price: Floats, left_price: Floats) -> Floats:
    """t + mu need + M D of each option at each column; shape (columns, options)."""
    return np.asarray(menu.ticks + np.multiply.outer(price, menu.need) + np.multiply.outer(left_price, menu.left))


def evaluate(instance: Instance, budget: int, prices: Floats) -> Bound:
    """bound(mu) at `prices`."""
    bound = Bound(0.0, prices)
    kinds, room, left = np.array(instance.kinds()), rooms(instance, budget), bound.left_prices
    best = np.empty(len(kinds))
    for kind in sorted(set(kinds.tolist())):
        menu, columns = instance.bound_menus[kind], np.flatnonzero(kinds == kind)
        for block in np.array_split(columns, -(-len(columns) // BLOCK)):
            table = worth(menu, prices[block], left[block])
            table[menu.need > room[block][:, None]] = np.inf
            best[block] = table.min(axis=1)
    return Bound(float(best.sum()) - budget * float(prices.sum()), prices)


def lower_bound(instance: Instance, budget: int) -> Bound:
    """The best bound that prices the last row alone.

    Raises:
        ValueError: the relaxation proves that no choice fits `budget`.
    """
    row = _LastRow(instance, budget)
    if not row.feasible:
        raise ValueError(f"nothing fits {budget} bytes at chunk length {instance.costs.chunk}")
    ticks, price = _maximise(row)
    return Bound(ticks, np.append(np.zeros(instance.costs.chunk_count - 1), price))


class _LastRow:
    """The relaxation that prices the last row alone, ready to be evaluated at any price."""

    def __init__(self, instance: Instance, budget: int) -> None:
        self.budget = budget
        kinds, room = instance.kinds(), rooms(instance, budget)
        self.last = instance.bound_menus[kinds[-1]]
        self.last_fits = self.last.need <= room[-1]
        self.groups: list[tuple[Menu, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for kind in sorted(set(kinds[:-1])):
            menu = instance.bound_menus[kind]
            order = np.argsort(menu.need, kind="stable")
            fitting = np.searchsorted(menu.need[order], room[:-1][[k == kind for k in kinds[:-1]]], side="right")
            counts, times = np.unique(fitting, return_counts=True)
            self.groups.append((menu, order, counts, times))

    @property
    def feasible(self) -> bool:
        """Whether every column has an option left, and those that leave least fit together; else no choice fits the budget."""
        if not self.last_fits.any() or any(counts.min() <= 0 for _, _, counts, _ in self.groups):
            return False
        used = int(self.last.need[self.last_fits].min())
        for menu, order, counts, times in self.groups:
            used += int(np.dot(times, np.minimum.accumulate(menu.left[order])[counts - 1]))
        return used <= self.budget

    def at(self, price: float) -> tuple[float, float]:
        """(bound, slope) at `price`: ticks, and bytes by which the relaxed choice exceeds the budget."""
        values = self.last.ticks[self.last_fits] + price * self.last.need[self.last_fits]
        best = int(np.argmin(values))
        bound, used = float(values[best]) - price * self.budget, int(self.last.need[self.last_fits][best])
        for menu, order, counts, times in self.groups:
            values = (menu.ticks + price * menu.left)[order]
            # The best option among the first n in order of need, for every n: where the running minimum was last lowered.
            lowered = np.where(values <= np.minimum.accumulate(values), np.arange(len(values)), 0)
            chosen = order[np.maximum.accumulate(lowered)[counts - 1]]
            bound += float(np.dot(times, (menu.ticks + price * menu.left)[chosen]))
            used += int(np.dot(times, menu.left[chosen]))
        return bound, float(used - self.budget)


def _maximise(row: _LastRow) -> tuple[float, float]:
    """The largest bound over prices, and its price."""
    best, slope = row.at(0.0)
    price, low, high = 0.0, 0.0, 1e-9
    if slope <= 0:
        return best, price
    while row.at(high)[1] > 0:
        low, high = high, high * 16
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        value, slope = row.at(middle)
        if value > best:
            best, price = value, middle
        if slope > 0:
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return best, price
