"""Prices for all rows of the bound, from a linear program over groups of columns, and the options worth searching.

Consecutive inner columns form a group of w columns that share prices. With X[g,j] the (fractional) number of columns of group g
that take option j, and P[g] the bytes left before the group,

    minimise sum of t_j X[g,j],    sum over j of X[g,j] = w,    P[g+1] = P[g] + sum over j of D_j X[g,j],
    w P[g] + sum over j of need_j X[g,j] + (smallest D) w (w - 1) / 2  <=  w B,

where the last row is the sum of the rows of the group's columns, each with the least its predecessors in the group can leave.
Its dual prices go into `bound.evaluate`, which proves the bound by itself. The program is solved by column generation: it
starts from the options of a feasible choice and adds, group by group, the option that the current prices make best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from adjcomp.passes.schedule.bound import Bound, Floats, evaluate, rooms, worth
from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.greedy import Choice
from adjcomp.passes.schedule.instance import Instance

GROUPS = 40  # of inner columns
ROUNDS = 30  # of column generation
TOLERANCE = 1e-7  # relative gain at which column generation ends


@dataclass(frozen=True)
class _Group:
    """Consecutive columns of one kind."""

    kind: int
    first: int
    size: int


def priced_bound(instance: Instance, budget: int, start: Choice, known: Bound, rounds: int = ROUNDS) -> Bound:
    """The best bound found by column generation from `start`, at least as good as `known`."""
    program = _Program(instance, budget, start)
    best = known
    for _ in range(rounds):
        prices, values = program.solve()
        bound = evaluate(instance, budget, prices)
        best = max(best, bound, key=lambda b: b.ticks)
        if not program.add_better(prices, values) or bound.ticks >= start.ticks * (1 - TOLERANCE):
            break
    return best


def least_extra(instance: Instance, budget: int, kind: int, bound: Bound) -> Floats:
    """What taking each option of menu `kind` once adds to `bound` at least: its smallest reduced cost over the columns; ticks."""
    kinds, room, left = np.array(instance.kinds()), rooms(instance, budget), bound.left_prices
    columns = np.flatnonzero(kinds == kind)
    menu, bound_menu = instance.menus[kind], instance.bound_menus[kind]
    extra = np.full(len(menu), np.inf)
    for block in np.array_split(columns, -(-len(columns) // 256)):
        table = worth(bound_menu, bound.prices[block], left[block])
        table[bound_menu.need > room[block][:, None]] = np.inf
        own = worth(menu, bound.prices[block], left[block])
        own[menu.need > room[block][:, None]] = np.inf
        extra = np.minimum(extra, (own - table.min(axis=1)[:, None]).min(axis=0))
    return extra


class _Program:
    """The linear program, in shares of the start's time and of the budget."""

    def __init__(self, instance: Instance, budget: int, start: Choice) -> None:
        self.instance, self.budget = instance, budget
        self.time = max(float(start.ticks), 1.0)
        self.groups = _groups(instance)
        self.room = rooms(instance, budget)
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.objective = self.solver.Objective()
        self.objective.SetMinimization()
        self.present: list[set[int]] = [set() for _ in self.groups]
        self.counts = [self.solver.Constraint(g.size, g.size) for g in self.groups]
        self.flows = [self.solver.Constraint(0, 0) for _ in self.groups]
        self.rows = [self.solver.Constraint(-self.solver.infinity(), self._capacity(g)) for g in self.groups]
        self._prefixes()
        for g, group in enumerate(self.groups):
            for option in sorted(set(start.options[group.first : group.first + group.size])):
                self._add(g, option)

    def _capacity(self, group: _Group) -> float:
        """Right side of a group's row, in budgets."""
        floor = int(self.instance.menus[1].left.min()) if group.size > 1 else 0
        return group.size - floor * group.size * (group.size - 1) / 2 / self.budget

    def _prefixes(self) -> None:
        """P[g]: bytes left before each group, in budgets; zero before the first."""
        for g in range(1, len(self.groups)):
            prefix = self.solver.NumVar(0.0, self.solver.infinity(), f"prefix_{g}")
            self.flows[g - 1].SetCoefficient(prefix, 1.0)
            self.rows[g].SetCoefficient(prefix, float(self.groups[g].size))
            if g < len(self.groups) - 1:
                self.flows[g].SetCoefficient(prefix, -1.0)

    def _add(self, g: int, option: int) -> None:
        """A variable X[g,option]."""
        menu = self.instance.menus[self.groups[g].kind]
        count = self.solver.NumVar(0.0, self.solver.infinity(), f"count_{g}_{option}")
        self.objective.SetCoefficient(count, float(menu.ticks[option]) / self.time)
        self.counts[g].SetCoefficient(count, 1.0)
        self.rows[g].SetCoefficient(count, float(menu.need[option]) / self.budget)
        if g < len(self.groups) - 1:
            self.flows[g].SetCoefficient(count, -float(menu.left[option]) / self.budget)
        self.present[g].add(option)

    def solve(self) -> tuple[Floats, Floats]:
        """Prices of all rows (ticks per byte, shape (C,)) and the value of one more column in each group (ticks)."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            raise RuntimeError("the relaxation's linear program has no solution although a choice fits")
        scale = self.time / self.budget
        prices = [max(0.0, -row.dual_value()) * scale for row in self.rows]
        values = np.array([count.dual_value() for count in self.counts]) * self.time
        return np.repeat(np.array(prices), [group.size for group in self.groups]), values

    def add_better(self, prices: Floats, values: Floats) -> bool:
        """Add to each group the option with the lowest reduced cost, where that is below zero; False when there was none."""
        added = False
        later = 0.0
        for g in range(len(self.groups) - 1, -1, -1):
            group = self.groups[g]
            menu, price = self.instance.menus[group.kind], float(prices[group.first])
            cost = worth(menu, np.array([price]), np.array([later]))[0]
            cost[menu.need > self.room[group.first]] = np.inf
            best = int(np.argmin(cost))
            if best not in self.present[g] and cost[best] < values[g] - TOLERANCE * self.time / len(self.groups):
                self._add(g, best)
                added = True
            later += price * group.size
        return added


def _groups(instance: Instance) -> list[_Group]:
    """The first column, groups of inner columns, and the last column."""
    kinds = instance.kinds()
    inner = np.flatnonzero(np.array(kinds) == 1)
    groups = [_Group(0, 0, 1)] if kinds[0] == 0 else []
    if len(inner):
        groups += [_Group(1, int(part[0]), len(part)) for part in np.array_split(inner, min(GROUPS, len(inner)))]
    return [*groups, _Group(2, len(kinds) - 1, 1)]


def worth_searching(instance: Instance, budget: int, kind: int, bound: Bound, best: Choice, most: int) -> tuple[Ints, bool]:
    """Options of a menu that a choice better than `best` may use, at most `most` of them; and whether those are all there are."""
    extra = least_extra(instance, budget, kind, bound)
    used = {option for option, k in zip(best.options, instance.kinds(), strict=True) if k == kind}
    possible = np.flatnonzero(extra <= best.ticks - bound.ticks + 1.0)
    order = possible[np.argsort(extra[possible], kind="stable")]
    chosen = sorted({*(int(j) for j in order[:most]), *used})
    return np.array(chosen, np.int64), len(order) <= most
