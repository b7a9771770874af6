"""The exact model: how many columns take which option, by CP-SAT.

Inner columns are alike, so a choice is a count y[j] for each option j, and an order. The order that fits whenever any does is
by falling need - D: of two neighbours i, j the pair needs max(need_i, D_i + need_j) or max(need_j, D_j + need_i), and the first
is the smaller one when need_i - D_i is the larger (options that leave little go first, those that hold much go last). With that
order

    S[0] = D of the first column,      S[j] = S[j-1] + D_j y_j,      sum of y = number of inner columns,
    y_j > 0  implies  S[j] - D_j + need_j <= B        (the last column with option j carries all before it),
    S[J] + need of the last column <= B,              minimise the sum of t.

Bytes are divided by their greatest common divisor, which changes nothing; where that leaves a budget above 2^30, they are divided
further, tiles rounded up and the budget rounded down, and then the model's own bound is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from adjcomp.passes.schedule.bound import Bound
from adjcomp.passes.schedule.column import Ints
from adjcomp.passes.schedule.greedy import Choice
from adjcomp.passes.schedule.instance import Instance, Menu
from adjcomp.passes.schedule.relaxation import worth_searching

MOST_UNITS = 1 << 30  # of bytes in the model
MOST_COST = 1 << 44  # of time in the model
MOST_OPTIONS = 96  # of a menu in the model
SEED = 7


@dataclass(frozen=True)
class Solved:
    """The best choice found, and a lower bound in ticks (minus infinity where the model proves none)."""

    choice: Choice
    bound: float
    effort: float  # deterministic seconds spent


@dataclass(frozen=True)
class _Scale:
    """Units of the model."""

    unit: int  # bytes
    exact: bool  # dividing by the unit lost nothing
    room: int  # the budget in units
    tick: int  # ticks in a unit of cost

    def up(self, size: int) -> int:
        return -(-size // self.unit)


def solve_counts(instance: Instance, budget: int, hint: Choice, relaxed: Bound, limit: float, gap: float) -> Solved:
    """Search from `hint`, at most `limit` deterministic seconds, until the gap is below `gap` times the hint's time."""
    menus = {kind: worth_searching(instance, budget, kind, relaxed, hint, MOST_OPTIONS) for kind in sorted(set(instance.kinds()))}
    useful = {kind: _in_order(instance.menus[kind], index) for kind, (index, _) in menus.items()}
    scale = _scale(instance, useful, budget)
    problem = _Model(instance, useful, scale)
    problem.expect(relaxed)
    problem.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = limit
    solver.parameters.absolute_gap_limit = gap * hint.ticks / scale.tick
    status = solver.solve(problem.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(hint, -math.inf, limit)
    found = problem.choice(solver)
    proven = scale.exact and instance.complete and all(whole for _, whole in menus.values())
    bound = solver.best_objective_bound * scale.tick + problem.constant if proven else -math.inf
    return Solved(found if found.ticks < hint.ticks else hint, bound, solver.response_proto.deterministic_time)


def _in_order(menu: Menu, index: Ints) -> Ints:
    """Options in the order in which their columns come."""
    return index[np.argsort((menu.left - menu.need)[index], kind="stable")]


def _scale(instance: Instance, useful: dict[int, Ints], budget: int) -> _Scale:
    """The units in which all useful options can be written."""
    sizes = [
        int(size)
        for kind, index in useful.items()
        for size in (*instance.menus[kind].left[index], *instance.menus[kind].need[index])
    ]
    spread = [
        int(t)
        for kind, index in useful.items()
        for t in instance.menus[kind].ticks[index] - instance.menus[kind].ticks[index].min()
    ]
    common = math.gcd(*sizes) or 1
    capped = min(budget, sum(sizes) * instance.costs.chunk_count)
    unit = common * max(1, -(-(capped // common) // MOST_UNITS))
    cost = max(1, -(-max(spread) * instance.costs.chunk_count // MOST_COST))
    return _Scale(unit, unit == common, capped // unit, cost)


class _Model:
    """The CP-SAT model and its variables."""

    def __init__(self, instance: Instance, useful: dict[int, Ints], scale: _Scale) -> None:
        self.instance, self.useful, self.scale = instance, useful, scale
        self.model = cp_model.CpModel()
        self.kinds = instance.kinds()
        self.inner = self.kinds.count(1)
        self.constant = 0
        self.cost: list[cp_model.LinearExpr] = []
        self.picks = {kind: self._pick(kind) for kind in useful if kind != 1}  # one boolean for each option of an end column
        self.counts: list[cp_model.IntVar] = []  # y[j]
        used = self._chosen(0, instance.menus[0].left) if 0 in useful else cp_model.LinearExpr.sum([])
        if self.inner:
            used = self._inner(used)
        self.model.add(used + self._chosen(2, instance.menus[2].need) <= scale.room)
        self.model.minimize(cp_model.LinearExpr.sum(self.cost))

    def _pick(self, kind: int) -> list[cp_model.IntVar]:
        """Exactly one option for an end column."""
        index = self.useful[kind]
        picks = [self.model.new_bool_var(f"pick_{kind}_{j}") for j in index]
        self.model.add_exactly_one(picks)
        self._add_cost(kind, picks, 1)
        return picks

    def _chosen(self, kind: int, sizes: Ints) -> cp_model.LinearExpr:
        """Bytes of the picked option of an end column, in units."""
        return cp_model.LinearExpr.weighted_sum(self.picks[kind], [self.scale.up(int(sizes[j])) for j in self.useful[kind]])

    def _inner(self, used: cp_model.LinearExpr) -> cp_model.LinearExpr:
        """Counts of the inner options, and the rows that carry them; returns what all but the last column leave."""
        menu, room = self.instance.menus[1], self.scale.room
        for j in self.useful[1]:
            left, need = self.scale.up(int(menu.left[j])), self.scale.up(int(menu.need[j]))
            most = min(self.inner, room // left if left > 0 else self.inner)
            count = self.model.new_int_var(0, most, f"count_{j}")
            present = self.model.new_bool_var(f"present_{j}")
            total = self.model.new_int_var(0, room, f"left_{j}")
            self.model.add(count == 0).only_enforce_if(present.negated())
            self.model.add(count >= 1).only_enforce_if(present)
            self.model.add(total == used + left * count)
            self.model.add(total <= room + left - need).only_enforce_if(present)
            self.counts.append(count)
            used = total
        self.model.add(cp_model.LinearExpr.sum(self.counts) == self.inner)
        self._add_cost(1, self.counts, self.inner)
        return used

    def _add_cost(self, kind: int, variables: list[cp_model.IntVar], how_many: int) -> None:
        """Add the time over the fastest option, rounded down to the unit of cost so that the model's bound stays a bound."""
        ticks = self.instance.menus[kind].ticks[self.useful[kind]]
        fastest = int(ticks.min())
        self.constant += fastest * how_many
        self.cost.append(cp_model.LinearExpr.weighted_sum(variables, [int(t - fastest) // self.scale.tick for t in ticks]))

    def expect(self, relaxed: Bound) -> None:
        """Tell the solver what the relaxation proves; the objective may be below by its rounding, one unit a column."""
        floor = math.floor((relaxed.ticks - self.constant) / self.scale.tick) - len(self.kinds)
        self.model.add(cp_model.LinearExpr.sum(self.cost) >= floor)

    def hint(self, choice: Choice) -> None:
        """Start the search from `choice`."""
        inner = [option for option, kind in zip(choice.options, self.kinds, strict=True) if kind == 1]
        for kind, picks in self.picks.items():
            wanted = choice.options[0 if kind == 0 else -1]
            for j, pick in zip(self.useful[kind], picks, strict=True):
                self.model.add_hint(pick, int(j) == wanted)
        for j, count in zip(self.useful.get(1, ()), self.counts, strict=True):
            self.model.add_hint(count, inner.count(int(j)))

    def choice(self, solver: cp_model.CpSolver) -> Choice:
        """The solver's answer as one option a column."""
        inner = [int(j) for j, count in zip(self.useful.get(1, ()), self.counts, strict=True) for _ in range(solver.value(count))]
        ends = {
            kind: next(int(j) for j, pick in zip(self.useful[kind], picks, strict=True) if solver.boolean_value(pick))
            for kind, picks in self.picks.items()
        }
        options = ([ends[0]] if 0 in ends else []) + inner + [ends[2]]
        ticks = sum(int(self.instance.menus[kind].ticks[option]) for kind, option in zip(self.kinds, options, strict=True))
        return Choice(tuple(options), ticks)
