"""One scheduling problem: a stack at one chunk length, a budget, and the options of its columns.

Columns differ only at the ends: the first drops its outgoing adjoint states, the last has no outgoing border and may be
shorter. A choice picks one option for each column; it fits when for every column c

    sum of D over the columns before c  +  need[c]  <=  budget,

where need = resident bytes + max(F, turn bytes + P) of its option. Its time is the sum of its options' times.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import HostTier, Share, total
from adjcomp.passes.schedule.column import Column, Ints, column_of
from adjcomp.passes.schedule.recompute import PassTable, pass_table
from adjcomp.passes.schedule.table import OptionTable, column_options

MOST_BYTES = 1 << 61  # int64 arithmetic on sums stays exact below this
EXACT_CHUNKS = 24  # up to which the first column has its own menu; in longer sequences it takes that of an inner one
TICKS = 1 << 50  # ticks in a whole step that runs every tile three times


@dataclass(frozen=True)
class Menu:
    """The options of one kind of column, with what each needs of the budget."""

    column: Column
    options: OptionTable
    need: Ints  # resident bytes + max(F, turn bytes + P)

    @property
    def left(self) -> Ints:
        """D of each option, bytes."""
        return self.options.left

    @property
    def ticks(self) -> Ints:
        """Time of each option, ticks."""
        return self.options.ticks

    def __len__(self) -> int:
        return len(self.need)


@dataclass(frozen=True)
class Spill:
    """Borders on the host: no column leaves any, and the place for a set of borders, or for two, is set aside on the device."""

    host: HostTier
    ahead: bool  # two sets: borders are fetched a whole column before they are needed
    border_bytes: int  # of one set


@dataclass(frozen=True)
class Instance:
    """The problem at one chunk length, for any budget. `menus` serve plans, `bound_menus` bounds; complete ones are the same."""

    costs: StackCosts
    tick: float  # seconds
    resident_bytes: int  # live during the whole step, or set aside for it
    backward_bytes: int  # the same and turn bytes, in the backward
    menus: tuple[Menu, Menu, Menu]  # first, inner and last columns
    bound_menus: tuple[Menu, Menu, Menu]
    exact_ends: bool  # whether the first column has a menu of its own rather than that of inner ones, which need a little more
    spill: Spill | None = None  # None: borders stay on the device
    reserved_bytes: int = 0  # of resident_bytes, what is set aside for borders that are elsewhere or rounded in the meantime

    @property
    def fixed_bytes(self) -> int:
        """The peak of the publications, when no border is left: a floor that no choice lowers. Where layers are published as the
        backward of the only chunk goes, options know better.
        """
        missing = self.menus[2].column.gradients
        if missing is not None and missing.publishing:
            return self.resident_bytes
        return self.backward_bytes - self.reserved_bytes + max(self.costs.publish_bytes, default=0)

    @cached_property
    def lean_menu(self) -> Menu:
        """Options of inner columns that hold nothing from the forward, with what their backward needs."""
        return _lean_menu(self.menus[1].column, self.tick, self.backward_bytes)

    @cached_property
    def lean_first(self) -> Menu:
        """The same for the first column."""
        return _lean_menu(column_of(self.costs, 0), self.tick, self.backward_bytes)

    @property
    def complete(self) -> bool:
        """Whether the menus hold every choice that could be best."""
        return self.exact_ends and all(menu.options.complete for menu in self.menus)

    def kinds(self) -> list[int]:
        """Index into `menus` of each column. A single column counts as the last."""
        count = self.costs.chunk_count
        return [2] if count == 1 else [0] + [1] * (count - 2) + [2]

    def modes(self, choice: Sequence[int]) -> list[ColumnMode]:
        """The modes of a choice (one option index a column)."""
        made: dict[tuple[int, int], ColumnMode] = {}
        found = []
        for kind, option in zip(self.kinds(), choice, strict=True):
            key = kind, int(option)
            if key not in made:
                made[key] = self.menus[kind].options.mode(key[1], self.menus[kind].column)
            found.append(made[key])
        return found


def build_instance(costs: StackCosts, share: Share, *, rounded: bool = False, noting: bool = True) -> Instance:
    """The instance of `costs` on the device of `share`; where that has a host tier, the one whose borders wait there; or the one
    whose borders are `rounded` to lower precision. Without `noting` no head leaves its internals where its input is dropped.
    """
    check_sizes(costs, share)
    tick = step_tick(costs)
    resident = total(share.resident_bytes)
    backward = resident + total(share.turn_bytes)
    columns = [column_of(costs, chunk) for chunk in (0, min(1, costs.chunk_count - 1), costs.chunk_count - 1)]
    away = [share.host is not None or (rounded and tile.narrow_bytes > 0) for tile in costs.layers]
    reserved = sum(size for size, gone in zip(columns[1].border_in, away, strict=True) if gone)
    spill = None if share.host is None else Spill(share.host, False, reserved)
    narrow = [tile.narrow_bytes if share.host is None else 0 for tile in costs.layers]
    columns = [_without_borders(column, away, narrow) for column in columns]
    columns[2] = replace(columns[2], rounded=0)
    resident, backward = resident + reserved, backward + reserved
    exact = costs.chunk_count <= EXACT_CHUNKS
    slack = 0 if exact else sum(columns[1].adjoint_out)
    if not exact:
        columns[0] = columns[1]
    menus = _menus(columns, tick, resident, backward, optimistic=False, noting=noting)
    whole = all(m.options.complete for m in menus)
    bounds = menus if whole else _menus(columns, tick, resident, backward, optimistic=True, noting=noting)
    first = Menu(bounds[0].column, bounds[0].options, bounds[0].need - slack)
    return Instance(costs, tick, resident, backward, menus, (first, *bounds[1:]), exact, spill, reserved)


def _without_borders(column: Column, away: Sequence[bool], narrow: Sequence[int]) -> Column:
    """A column in which the borders of some layers are put away, and what is left of each: none on the host, else n[k,c]."""
    into = [0 if gone else size for gone, size in zip(away, column.border_in, strict=True)]
    out = [min(less, size) if gone else size for gone, less, size in zip(away, narrow, column.border_out, strict=True)]
    kept = sum(less for gone, less in zip(away, narrow, strict=True) if gone)
    return replace(column, border_in=tuple(into), border_out=tuple(out), rounded=kept)


def fetching_ahead(instance: Instance) -> Instance:
    """A spilled instance with a second set of borders on the device."""
    assert instance.spill is not None
    more = instance.spill.border_bytes

    def wider(menus: tuple[Menu, Menu, Menu]) -> tuple[Menu, Menu, Menu]:
        first, inner, last = (replace(menu, need=menu.need + more) for menu in menus)
        return first, inner, last

    return replace(
        instance,
        resident_bytes=instance.resident_bytes + more,
        backward_bytes=instance.backward_bytes + more,
        menus=wider(instance.menus),
        bound_menus=wider(instance.bound_menus),
        spill=replace(instance.spill, ahead=True),
        reserved_bytes=instance.reserved_bytes + more,
    )


def _lean_menu(column: Column, tick: float, backward: int) -> Menu:
    """The options of a column that hold nothing from the forward, with what their backward needs."""
    options = column_options(column, tick, pass_table(column, tick), noting=False)
    options = options.select(np.flatnonzero(options.held == 0))
    return _undominated(Menu(column, options, backward + options.backward_peak))


def _menus(
    columns: Sequence[Column], tick: float, resident: int, backward: int, *, optimistic: bool, noting: bool
) -> tuple[Menu, Menu, Menu]:
    """Menus of the first, inner and last column; equal columns share one, and columns with equal backwards a pass table."""
    made: dict[Column, Menu] = {}
    passes: dict[Column, PassTable] = {}
    for column in columns:
        if column not in made:
            backwards = replace(column, border_out=())
            if backwards not in passes:
                passes[backwards] = pass_table(column, tick, optimistic=optimistic)
            options = column_options(column, tick, passes[backwards], noting=noting)
            made[column] = _menu(column, options, resident, backward)
    first, inner, last = (made[column] for column in columns)
    return first, inner, last


def _menu(column: Column, options: OptionTable, resident: int, backward: int) -> Menu:
    """The options that no other dominates, with what each needs."""
    return _undominated(Menu(column, options, np.maximum(resident + options.forward_peak, backward + options.backward_peak)))


def _undominated(menu: Menu) -> Menu:
    """Only the options that no other beats or equals in bytes left, need and ticks; fastest first.

    Walking from the fastest, a staircase of the (left, need) seen so far, left rising and need falling, tells whether one of
    them is at least as good.
    """
    kept: list[int] = []
    lefts: list[int] = []
    needs: list[int] = []
    for index in np.lexsort((menu.need, menu.left, menu.ticks)).tolist():
        left, need = int(menu.left[index]), int(menu.need[index])
        place = bisect_right(lefts, left)
        if place and needs[place - 1] <= need:
            continue
        end = place
        while end < len(lefts) and needs[end] >= need:
            end += 1
        lefts[place:end], needs[place:end] = [left], [need]
        kept.append(index)
    chosen = np.array(kept)
    return Menu(menu.column, menu.options.select(chosen), menu.need[chosen])


def step_tick(costs: StackCosts) -> float:
    """Seconds of one tick: small enough that rounding doesn't show, large enough that sums of ticks stay exact."""
    longest = 0.0
    for table, count in ((costs.layers, costs.chunk_count - 1), (costs.last_layers, 1)):
        longest += count * math.fsum(3 * max(t.forward_seconds, t.keep_seconds) + t.adjoint_seconds for t in table)
    if not math.isfinite(longest) or longest < 0:
        raise ValueError(f"the costs' seconds must be finite and not negative; a step would take {longest}")
    return longest / TICKS if longest > 0 else 1.0


def check_sizes(costs: StackCosts, share: Share) -> None:
    """ValueError for bytes that no machine has, which would overflow the arithmetic."""
    tiles = [t for table in (costs.layers, costs.last_layers) for t in table]
    sizes = [
        (t.stream_bytes, t.carry_bytes, t.keep_bytes, t.cotangent_bytes, t.adjoint_bytes)
        + (t.forward_workspace_bytes, t.keep_workspace_bytes, t.adjoint_workspace_bytes)
        for t in tiles
    ]
    if min(min(row) for row in sizes) < 0:
        raise ValueError("a tile's bytes can't be negative")
    most = sum(sum(row) for row in sizes) * costs.chunk_count + total(share.resident_bytes) + total(share.turn_bytes)
    if most > MOST_BYTES:
        raise ValueError(f"these costs add up to {most} bytes, more than any machine holds")
