"""Modes to actions where borders are put away until the backward comes for them: to the host, or rounded to lower precision.

All borders are put away but that of the last chunk, whose backward follows its forward at once; or only those of the oldest
chunks, which wait longest. A border is dropped when the next chunk's forward has read it. In the backward each is brought back
into the place of the one of the same layer that the chunk at work has just dropped; or, from the host, `ahead`: those of chunk
c - 1 when the backward of chunk c begins, so that two sets of borders are on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from adjcomp.ir.actions import Action, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.plan import HostTier
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.ir.values import Kind, Value, carry, has_carry
from adjcomp.passes.emit import Column, backward_column, check_modes, forward_column, publications, whole_step
from adjcomp.passes.lifetimes import drop_after_last_use, dropping
from adjcomp.passes.nesting import COPIES, bringing
from adjcomp.passes.recipes import Recipes

LIKE = 4  # chunks of a sequence in which a column has the neighbours that it has in a longer one


@dataclass(frozen=True)
class Way(ABC):
    """Where borders are in the meantime."""

    costs: StackCosts

    @property
    def columns(self) -> int:
        """How many chunks, from the first on, have the border put away that comes into them."""
        return self.costs.chunk_count - 1

    @property
    def ahead(self) -> bool:
        """Whether all of a column's borders are brought back a column before."""
        return False

    @abstractmethod
    def takes(self, layer: int) -> bool:
        """Whether borders of a layer are put away; those of others stay."""

    @abstractmethod
    def away(self, border: Value) -> Action:
        """Puts a border away; it is dropped later."""

    @abstractmethod
    def back(self, border: Value) -> Action:
        """Makes the border again."""


@dataclass(frozen=True)
class ToHost(Way):
    """In pinned host memory. oldest: how many chunks spill their border; None: all but the last."""

    early: bool
    oldest: int | None = None

    @property
    def columns(self) -> int:
        return super().columns if self.oldest is None else min(self.oldest, super().columns)

    @property
    def ahead(self) -> bool:
        return self.early

    def takes(self, layer: int) -> bool:
        return has_carry(self.costs.tile(layer, 0))

    def away(self, border: Value) -> Action:
        return Offload(border, stream=COPIES)

    def back(self, border: Value) -> Action:
        return Fetch(border, stream=COPIES)


@dataclass(frozen=True)
class Rounded(Way):
    """On the device, in lower precision."""

    def takes(self, layer: int) -> bool:
        return self.costs.tile(layer, 0).narrow_bytes > 0

    def away(self, border: Value) -> Action:
        return Narrow(border.layer, border.chunk)

    def back(self, border: Value) -> Action:
        return Widen(border.layer, border.chunk)


def emit_away(way: Way, modes: Sequence[ColumnMode]) -> tuple[Action, ...]:
    """The actions of a step whose borders are put away; `modes[c]` says what chunk c keeps.

    Raises:
        ValueError: there are not as many modes as chunks, a mode holds tiles that have no VJP, or there are fewer than three
            chunks, so that there is nothing to put away.
    """
    costs = way.costs
    check_modes(costs, modes)
    if costs.chunk_count < 3:
        raise ValueError(f"a sequence of {costs.chunk_count} chunks has no border to put away")
    last = costs.chunk_count - 1
    made: dict[tuple[object, ...], tuple[Column, Column]] = {}
    columns = []
    for chunk, mode in enumerate(modes):
        around = (modes[max(chunk - 1, 0)], mode, modes[min(chunk + 1, last)])
        key = (around, chunk == 0, max(chunk, last - 2), min(max(way.columns - chunk, -1), 2))
        if key not in made:
            made[key] = _columns(way, around, chunk)
        columns.append(made[key])
    first = border_reads(way, modes[0]) if way.columns else []
    start = [Start(0, costs.head), *(way.away(carry(k, -1)) for k in first)]
    return whole_step(costs, start, columns)


def border_reads(way: Way, mode: ColumnMode) -> list[int]:
    """Layers whose incoming state the backward of a chunk reads and that are put away, in the order of their first reads."""
    reads = (value for action in backward_column(way.costs, 0, mode) for value in action.reads(way.costs))
    return list(dict.fromkeys(value.layer for value in reads if value.kind is Kind.CARRY and way.takes(value.layer)))


def _columns(way: Way, around: tuple[ColumnMode, ColumnMode, ColumnMode], chunk: int) -> tuple[Column, Column]:
    """Forward and backward of a column like `chunk` between its neighbours, from the shortest sequence that has such a one."""
    count = min(way.costs.chunk_count, LIKE)
    place = 0 if chunk == 0 else max(1, count - (way.costs.chunk_count - chunk))
    modes = [around[1]] * count
    for neighbour, mode in ((place - 1, around[0]), (place + 1, around[2])):
        if 0 <= neighbour < count:
            modes[neighbour] = mode
    few = _shorter(way, count, max(0, place + way.columns - chunk))
    parts: dict[tuple[bool, int], list[int]] = {}
    actions: list[Action] = []
    for back, at, action in _in_order(few, modes):
        parts.setdefault((back, at), []).append(len(actions))
        actions.append(action)
    dropped = drop_after_last_use(few.costs, actions)
    forward, backward = ([dropped[i] for i in parts[back, place]] for back in (False, True))
    if place == 0 and way.columns:
        backward = _borders_dropped_last(way, backward)
    return Column(tuple(forward), place), Column(tuple(backward), place)


def _shorter(way: Way, count: int, columns: int) -> Way:
    """The same way with fewer chunks."""
    costs = replace(way.costs, chunk_count=count)
    return replace(way, costs=costs, oldest=columns) if isinstance(way, ToHost) else replace(way, costs=costs)


def _in_order(way: Way, modes: Sequence[ColumnMode]) -> Iterator[tuple[bool, int, Action]]:
    """The actions in order, without what they drop: whether each belongs to the backward, and its chunk (-1: to none)."""
    costs, last = way.costs, len(modes) - 1
    wanted = [border_reads(way, mode) if chunk < way.columns else [] for chunk, mode in enumerate(modes)]
    yield False, -1, Start(0, costs.head)
    for k in wanted[0]:
        yield False, -1, way.away(carry(k, -1))
    for chunk, mode in enumerate(modes):
        for action in forward_column(costs, chunk, mode):
            yield False, chunk, action
            for value in action.writes(costs):
                if value.kind is Kind.CARRY and chunk < last and value.layer in wanted[chunk + 1]:
                    yield False, chunk, way.away(value)
    yield True, -1, Turn(0, costs.head)
    for chunk in range(last, -1, -1):
        coming = [carry(k, chunk - 2) for k in wanted[chunk - 1]] if chunk > 0 else []
        down = list(backward_column(costs, chunk, modes[chunk]))
        for action in bringing(costs, down, coming, way.back, ahead=way.ahead):
            yield True, chunk, action
    yield from ((True, -1, action) for action in publications(costs))


def _borders_dropped_last(way: Way, actions: Sequence[Action]) -> list[Action]:
    """The same, with borders that were put away dropped at the end: so the place for a set of them is taken all through the
    backward, as the planner counts it.
    """

    def late(value: Value) -> bool:
        return value.kind is Kind.CARRY and way.takes(value.layer)

    borders = tuple(value for action in actions for value in action.frees if late(value))
    rest = [dropping(action, tuple(value for value in action.frees if not late(value))) for action in actions]
    return [*rest[:-1], dropping(rest[-1], (*rest[-1].frees, *borders))]


class HostTimes:
    """When the actions of one device with a host tier run, by the rules in `adjcomp.ir.transfers`; seconds."""

    def __init__(self, costs: StackCosts, host: HostTier) -> None:
        self.recipes, self.host = Recipes(costs), host
        self.now = self.working = 0.0  # when the last computation ended, and what computations alone take
        self.out_free = self.in_free = 0.0  # when each direction of the link is free
        self.leaving: dict[Value, float] = {}
        self.coming: dict[tuple[Kind, int, int], tuple[float, int]] = {}  # when a value is there, and what that frees on the host
        self.bytes = self.peak = 0

    def run(self, actions: Iterable[Action]) -> HostTimes:
        """Run `actions`; returns itself."""
        for action in actions:
            if isinstance(action, Offload):
                self._offload(action.value)
            elif isinstance(action, Fetch | Load):
                self._fetch(action.value, stays=isinstance(action, Load))
            else:
                self._compute(action)
        return self

    def _offload(self, value: Value) -> None:
        size = self.recipes.size(value)
        self.out_free = max(self.now, self.out_free) + self.host.seconds(size)
        self.leaving[value] = self.out_free
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _fetch(self, value: Value, *, stays: bool) -> None:
        size = self.recipes.size(value)
        self.in_free = max(self.now, self.in_free) + self.host.seconds(size)
        self.coming[value] = (self.in_free, 0 if stays else size)

    def _compute(self, action: Action) -> None:
        recipe, chunk = self.recipes.of(action)
        start = self.now
        if self.coming:
            for kind, layer, offset in recipe.reads:
                there = self.coming.pop((kind, layer, chunk + offset), None)
                if there is not None:
                    start = max(start, there[0])
                    self.bytes -= there[1]
        end = start + recipe.seconds
        for value in action.frees:
            end = max(end, self.leaving.pop(value, 0.0))
        self.now = end
        self.working += recipe.seconds
