"""Modes to actions: the order in which one device runs a step, and when each value is dropped.

The order is time-major: all layers of chunk 0, of chunk 1, …, then back. Every value is dropped by the last action that reads
or writes it, found in one walk from the end. Columns with equal modes run the same actions on other chunks, so the walk is done
once for each mode, on a sequence of at most three chunks, and shifted in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.values import Value, has_carry


class Step(NamedTuple):
    """An action without what it frees. Fields that its type doesn't have are 0 and False."""

    kind: type[Action]
    layer: int = 0
    chunk: int = 0
    keep: bool = False

    def action(self, frees: tuple[Value, ...]) -> Action:
        """The action that drops `frees`."""
        kind, layer, chunk, keep = self
        if kind is Forward or kind is Recompute:
            return kind(layer, chunk, keep, frees=frees)
        if kind is Adjoint or kind is Advance:
            return kind(layer, chunk, frees=frees)
        if kind is Loss:
            return Loss(chunk, keep, frees=frees)
        if kind is HeadVjp:
            return HeadVjp(chunk, frees=frees)
        return Publish(layer, frees=frees) if kind is Publish else kind(frees=frees)


@dataclass(frozen=True)
class Column:
    """The actions of one column in one direction: steps with what they free, for chunk `chunk`."""

    steps: tuple[tuple[Step, tuple[Value, ...]], ...]
    chunk: int

    def at(self, chunk: int) -> Iterator[Action]:
        """The same actions for another chunk."""
        shift = chunk - self.chunk
        for (kind, layer, _, keep), frees in self.steps:
            yield Step(kind, layer, chunk, keep).action(tuple([Value(what, where, c + shift) for what, where, c in frees]))


def emit(costs: StackCosts, modes: Sequence[ColumnMode]) -> tuple[Action, ...]:
    """The actions of a step; `modes[c]` says what chunk c keeps.

    Raises:
        ValueError: there are not as many modes as chunks, or a mode holds tiles that have no VJP.
    """
    if len(modes) != costs.chunk_count:
        raise ValueError(f"{costs.chunk_count} chunks need as many modes, not {len(modes)}")
    most = costs.head + 1 - bottom_layer(costs)
    if any(not 0 <= mode.held <= most for mode in modes):
        raise ValueError(f"a chunk can hold between 0 and {most} tiles")
    made: dict[tuple[ColumnMode, bool, bool], tuple[Column, Column]] = {}
    last = costs.chunk_count - 1
    columns = []
    for chunk, mode in enumerate(modes):
        key = (mode, chunk == 0, chunk == last)
        if key not in made:
            made[key] = _columns(costs, mode, chunk)
        columns.append(made[key])
    actions: list[Action] = [Start()]
    for chunk, (forward, _) in enumerate(columns):
        actions.extend(forward.at(chunk))
    actions.append(Turn())
    for chunk in range(last, -1, -1):
        actions.extend(columns[chunk][1].at(chunk))
    actions.extend(Publish(layer) for layer in range(costs.head, bottom_layer(costs) - 1, -1))
    return tuple(actions)


@dataclass(frozen=True)
class Run:
    """One piece of a nested backward: advance over chunks first … end - 1, or, where they are equal, reverse chunk `first`."""

    first: int
    end: int


def emit_nested(costs: StackCosts, modes: Sequence[ColumnMode], runs: Sequence[Run]) -> tuple[Action, ...]:
    """The actions of a step whose backward consists of `runs`; what is stored follows from what is read later."""
    return tuple(step.action(frees) for step, frees in last_uses(costs, _nested(costs, modes, runs)))


def _nested(costs: StackCosts, modes: Sequence[ColumnMode], runs: Sequence[Run]) -> Iterator[Step]:
    """The steps of a nested plan in order, without what they drop."""
    advanced = [k for k in range(costs.head + 1) if any(has_carry(costs.tile(j, 0)) for j in range(k, costs.head + 1))]
    yield from forward_steps(costs, modes)
    for run in runs:
        if run.first == run.end:
            yield from backward_column(costs, run.first, modes[run.first])
        for chunk in range(run.first, run.end):
            yield from (Step(Advance, layer, chunk) for layer in advanced)
    yield from publish_steps(costs)


def _columns(costs: StackCosts, mode: ColumnMode, chunk: int) -> tuple[Column, Column]:
    """Forward and backward of a column like `chunk`, from the shortest sequence in which it has the same neighbours."""
    count = min(costs.chunk_count, 3)
    place = 0 if chunk == 0 else count - 1 if chunk == costs.chunk_count - 1 else 1
    steps = last_uses(replace(costs, chunk_count=count), time_major(costs, [mode] * count))
    turn = next(index for index, (step, _) in enumerate(steps) if step.kind is Turn)
    mine = [tuple(s for s in part if s[0].kind in _TILE_ACTIONS and s[0].chunk == place) for part in (steps[:turn], steps[turn:])]
    return Column(mine[0], place), Column(mine[1], place)


_TILE_ACTIONS = (Forward, Loss, Recompute, HeadVjp, Adjoint)


def time_major(costs: StackCosts, modes: Sequence[ColumnMode]) -> Iterator[Step]:
    """The steps of one device in order, without what they drop."""
    yield from forward_steps(costs, modes)
    for chunk in range(len(modes) - 1, -1, -1):
        yield from backward_column(costs, chunk, modes[chunk])
    yield from publish_steps(costs)


def forward_steps(costs: StackCosts, modes: Sequence[ColumnMode]) -> Iterator[Step]:
    """From the start to the turn."""
    yield Step(Start)
    for chunk, mode in enumerate(modes):
        first = mode.first_held(costs)
        for layer in range(costs.head):
            yield Step(Forward, layer, chunk, layer >= first)
        yield Step(Loss, 0, chunk, first <= costs.head)
    yield Step(Turn)


def publish_steps(costs: StackCosts) -> Iterator[Step]:
    """The gradients of every layer, once all adjoints are done."""
    for layer in range(costs.head, bottom_layer(costs) - 1, -1):
        yield Step(Publish, layer)


def backward_column(costs: StackCosts, chunk: int, mode: ColumnMode) -> Iterator[Step]:
    """The backward of one chunk: held tiles first, which frees what they held, then the pass from the stem and its way back."""
    bottom = bottom_layer(costs)
    for layer in range(costs.head, max(mode.first_held(costs), bottom) - 1, -1):
        yield _vjp(costs, layer, chunk)
    top = mode.top_recomputed(costs)
    if top is None:
        return
    for layer in range(top + 1):
        yield Step(Recompute, layer, chunk, layer >= bottom and (layer == top or layer not in mode.again))
    for layer in range(top, bottom - 1, -1):
        if layer in mode.again and layer != top:
            yield Step(Recompute, layer, chunk, True)
        yield _vjp(costs, layer, chunk)


def last_uses(costs: StackCosts, steps: Iterable[Step]) -> list[tuple[Step, tuple[Value, ...]]]:
    """`steps`, each with the values that no later step reads.

    Walking back from the end, a value that is read and not yet wanted later is read here for the last time; one that is written
    and not wanted later is dropped at once; a write ends the want, so a value that is made twice has two lives.
    """
    wanted: set[Value] = set()
    found: list[tuple[Step, tuple[Value, ...]]] = []
    uses = _Uses(costs)
    for step in reversed(list(steps)):
        reads, writes = uses.of(step)
        frees: list[Value] = []
        for value in writes:
            if value in wanted:
                wanted.discard(value)
            else:
                frees.append(value)
        for value in reads:
            if value not in wanted:
                wanted.add(value)
                frees.append(value)
        found.append((step, tuple(frees)))
    found.reverse()
    return found


class _Uses:
    """What steps read and write, looked up once for each layer: the chunks beside the ends are all alike."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self._known: dict[tuple[type[Action], int, bool, bool], tuple[tuple[Value, ...], tuple[Value, ...], int]] = {}

    def of(self, step: Step) -> tuple[list[Value], list[Value]]:
        """Reads and writes of `step`."""
        kind, layer, chunk, keep = step
        key = (kind, layer, keep, chunk == self.costs.chunk_count - 1)
        found = self._known.get(key)
        if found is None:
            action = step.action(())
            found = self._known[key] = (action.reads(self.costs), action.writes(self.costs), chunk)
        reads, writes, at = found
        shift = chunk - at
        return [Value(what, where, c + shift) for what, where, c in reads], [
            Value(what, where, c + shift) for what, where, c in writes
        ]


def _vjp(costs: StackCosts, layer: int, chunk: int) -> Step:
    """The VJP of one tile."""
    return Step(HeadVjp, 0, chunk) if layer == costs.head else Step(Adjoint, layer, chunk)
