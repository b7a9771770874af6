"""Modes to actions where borders wait on the host: offloaded when they are made, fetched before the backward comes for them.

All borders are spilled but that of the last chunk, whose backward follows its forward at once. A border leaves the device when
the next chunk's forward has read it. With `ahead`, the borders of chunk c - 1 are fetched when the backward of chunk c begins, so
that two sets of borders are on the device; else each is fetched into the place of the one that chunk c has just dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from adjcomp.ir.actions import Action, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import HostTier
from adjcomp.ir.transfers import Fetch, Offload
from adjcomp.ir.values import Kind, Value, carry
from adjcomp.passes.emit import Column, backward_column, check_modes, forward_column, publications
from adjcomp.passes.lifetimes import drop_after_last_use, dropping
from adjcomp.passes.recipes import Recipes

COPIES = 1  # the stream of transfers
LIKE = 4  # chunks of a sequence in which a column has the neighbours that it has in a longer one


def emit_spilled(costs: StackCosts, modes: Sequence[ColumnMode], *, ahead: bool) -> tuple[Action, ...]:
    """The actions of a step whose borders wait on the host; `modes[c]` says what chunk c keeps.

    Raises:
        ValueError: there are not as many modes as chunks, a mode holds tiles that have no VJP, or there are fewer than three
            chunks, of which nothing can be spilled.
    """
    check_modes(costs, modes)
    if costs.chunk_count < 3:
        raise ValueError(f"a sequence of {costs.chunk_count} chunks has no border to spill")
    last = costs.chunk_count - 1
    made: dict[tuple[object, ...], tuple[Column, Column]] = {}
    columns = []
    for chunk, mode in enumerate(modes):
        around = (modes[max(chunk - 1, 0)], mode, modes[min(chunk + 1, last)])
        key = (around, chunk == 0, max(chunk, last - 2))
        if key not in made:
            made[key] = _columns(costs, around, chunk, ahead)
        columns.append(made[key])
    actions: list[Action] = [Start(0, costs.head)]
    actions.extend(Offload(carry(k, -1), stream=COPIES) for k in border_reads(costs, modes[0]))
    for chunk, (forward, _) in enumerate(columns):
        actions.extend(forward.at(chunk))
    actions.append(Turn(0, costs.head))
    for chunk in range(last, -1, -1):
        actions.extend(columns[chunk][1].at(chunk))
    actions.extend(publications(costs))
    return tuple(actions)


def border_reads(costs: StackCosts, mode: ColumnMode) -> list[int]:
    """Layers whose incoming state the backward of a chunk reads, in the order of their first reads."""
    reads = (value for action in backward_column(costs, 0, mode) for value in action.reads(costs))
    return list(dict.fromkeys(value.layer for value in reads if value.kind is Kind.CARRY))


def _columns(
    costs: StackCosts, around: tuple[ColumnMode, ColumnMode, ColumnMode], chunk: int, ahead: bool
) -> tuple[Column, Column]:
    """Forward and backward of a column like `chunk` between its neighbours, from the shortest sequence that has such a one."""
    count = min(costs.chunk_count, LIKE)
    place = 0 if chunk == 0 else max(1, count - (costs.chunk_count - chunk))
    modes = [around[1]] * count
    for neighbour, mode in ((place - 1, around[0]), (place + 1, around[2])):
        if 0 <= neighbour < count:
            modes[neighbour] = mode
    few = replace(costs, chunk_count=count)
    parts: dict[tuple[bool, int], list[int]] = {}
    actions: list[Action] = []
    for back, at, action in _in_order(few, modes, ahead):
        parts.setdefault((back, at), []).append(len(actions))
        actions.append(action)
    dropped = drop_after_last_use(few, actions)
    forward, backward = ([dropped[i] for i in parts[back, place]] for back in (False, True))
    if place == 0:
        backward = _borders_dropped_last(backward)
    return Column(tuple(forward), place), Column(tuple(backward), place)


def _in_order(costs: StackCosts, modes: Sequence[ColumnMode], ahead: bool) -> Iterator[tuple[bool, int, Action]]:
    """The actions in order, without what they drop: whether each belongs to the backward, and its chunk (-1: to none)."""
    last = len(modes) - 1
    wanted = [border_reads(costs, mode) for mode in modes]
    yield False, -1, Start(0, costs.head)
    for k in wanted[0]:
        yield False, -1, Offload(carry(k, -1), stream=COPIES)
    for chunk, mode in enumerate(modes):
        for action in forward_column(costs, chunk, mode):
            yield False, chunk, action
            for value in action.writes(costs):
                if value.kind is Kind.CARRY and chunk < last - 1 and value.layer in wanted[chunk + 1]:
                    yield False, chunk, Offload(value, stream=COPIES)
    yield True, -1, Turn(0, costs.head)
    for chunk in range(last, -1, -1):
        coming = [carry(k, chunk - 2) for k in wanted[chunk - 1]] if chunk > 0 else []
        for action in _fetching(costs, list(backward_column(costs, chunk, modes[chunk])), coming, ahead):
            yield True, chunk, action
    yield from ((True, -1, action) for action in publications(costs))


def _fetching(costs: StackCosts, actions: Sequence[Action], coming: Iterable[Value], ahead: bool) -> Iterator[Action]:
    """A column's backward with the fetches of `coming`, what the column before it reads: all at once, or each when the border
    of the same layer has been read here for the last time.
    """
    last_read: dict[int, int] = {}
    if not ahead:
        for index, action in enumerate(actions):
            last_read.update({value.layer: index for value in action.reads(costs) if value.kind is Kind.CARRY})
    after: dict[int, list[Value]] = {}
    for value in coming:
        after.setdefault(last_read.get(value.layer, -1), []).append(value)
    yield from (Fetch(value, stream=COPIES) for value in after.get(-1, ()))
    for index, action in enumerate(actions):
        yield action
        yield from (Fetch(value, stream=COPIES) for value in after.get(index, ()))


def _borders_dropped_last(actions: Sequence[Action]) -> list[Action]:
    """The same, with borders dropped at the end: so the place for a set of borders is taken all through the backward, as the
    planner counts it.
    """
    borders = tuple(v for a in actions for v in a.frees if v.kind is Kind.CARRY)
    rest = [dropping(a, tuple(v for v in a.frees if v.kind is not Kind.CARRY)) for a in actions]
    return [*rest[:-1], dropping(rest[-1], (*rest[-1].frees, *borders))]


class HostTimes:
    """When the actions of one device with a host tier run, by the rules in `adjcomp.ir.transfers`; seconds."""

    def __init__(self, costs: StackCosts, host: HostTier) -> None:
        self.recipes, self.host = Recipes(costs), host
        self.now = self.working = 0.0  # when the last computation ended, and what computations alone take
        self.out_free = self.in_free = 0.0  # when each direction of the link is free
        self.leaving: dict[Value, float] = {}
        self.coming: dict[tuple[Kind, int, int], float] = {}
        self.bytes = self.peak = 0

    def run(self, actions: Iterable[Action]) -> HostTimes:
        """Run `actions`; returns itself."""
        for action in actions:
            if isinstance(action, Offload):
                self._offload(action.value)
            elif isinstance(action, Fetch):
                self._fetch(action.value)
            else:
                self._compute(action)
        return self

    def _offload(self, value: Value) -> None:
        size = self.recipes.size(value)
        self.out_free = max(self.now, self.out_free) + self.host.seconds(size)
        self.leaving[value] = self.out_free
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _fetch(self, value: Value) -> None:
        self.in_free = max(self.now, self.in_free) + self.host.seconds(self.recipes.size(value))
        self.coming[value] = self.in_free

    def _compute(self, action: Action) -> None:
        recipe, chunk = self.recipes.of(action)
        start = self.now
        if self.coming:
            for kind, layer, offset in recipe.reads:
                there = self.coming.pop((kind, layer, chunk + offset), None)
                if there is not None:
                    start = max(start, there)
                    self.bytes -= self.recipes.size(Value(kind, layer, chunk + offset))
        end = start + recipe.seconds
        for value in action.frees:
            end = max(end, self.leaving.pop(value, 0.0))
        self.now = end
        self.working += recipe.seconds
