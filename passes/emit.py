"""Modes to actions: the order in which one device runs a step, and when each value is dropped.

The order is time-major: all layers of chunk 0, of chunk 1, …, then back. Every value is dropped by the last action that reads
or writes it, found in one walk from the end. Columns with equal modes run the same actions on other chunks, so the walk is done
once for each mode, on a sequence of at most three chunks, and shifted in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.ir.values import Value

Step = tuple[type[Action], tuple[int | bool, ...]]  # an action's type and its own fields: everything but `frees`


@dataclass(frozen=True)
class Column:
    """The actions of one column in one direction, relative to its chunk."""

    actions: tuple[Action, ...]  # as they are for chunk `chunk`
    chunk: int

    def at(self, chunk: int) -> Iterator[Action]:
        """The same actions for another chunk."""
        if chunk == self.chunk:
            yield from self.actions
            return
        shift = chunk - self.chunk
        for action in self.actions:
            frees = tuple([Value(kind, layer, c + shift) for kind, layer, c in action.frees])
            match action:
                case Forward(layer=layer, keep=keep):
                    yield Forward(layer, chunk, keep, frees=frees)
                case Recompute(layer=layer, keep=keep):
                    yield Recompute(layer, chunk, keep, frees=frees)
                case Adjoint(layer=layer):
                    yield Adjoint(layer, chunk, frees=frees)
                case Loss(keep=keep):
                    yield Loss(chunk, keep, frees=frees)
                case HeadVjp():
                    yield HeadVjp(chunk, frees=frees)
                case _:
                    raise TypeError(f"{type(action).__name__} belongs to no column")


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


def _columns(costs: StackCosts, mode: ColumnMode, chunk: int) -> tuple[Column, Column]:
    """Forward and backward of a column like `chunk`, from the shortest sequence in which it has the same neighbours."""
    count = min(costs.chunk_count, 3)
    place = 0 if chunk == 0 else count - 1 if chunk == costs.chunk_count - 1 else 1
    actions = drop_after_last_use(replace(costs, chunk_count=count), time_major(costs, [mode] * count))
    turn = next(index for index, action in enumerate(actions) if isinstance(action, Turn))
    mine = [[a for a in part if isinstance(a, _TILE_ACTIONS) and a.chunk == place] for part in (actions[:turn], actions[turn:])]
    return Column(tuple(mine[0]), place), Column(tuple(mine[1]), place)


_TILE_ACTIONS = (Forward, Loss, Recompute, HeadVjp, Adjoint)


def time_major(costs: StackCosts, modes: Sequence[ColumnMode]) -> Iterator[Step]:
    """The steps of one device in order, without what they drop."""
    yield Start, ()
    for chunk, mode in enumerate(modes):
        first = mode.first_held(costs)
        for layer in range(costs.head):
            yield Forward, (layer, chunk, layer >= first)
        yield Loss, (chunk, first <= costs.head)
    yield Turn, ()
    for chunk in range(len(modes) - 1, -1, -1):
        yield from backward_column(costs, chunk, modes[chunk])
    for layer in range(costs.head, bottom_layer(costs) - 1, -1):
        yield Publish, (layer,)


def backward_column(costs: StackCosts, chunk: int, mode: ColumnMode) -> Iterator[Step]:
    """The backward of one chunk: held tiles first, which frees what they held, then the pass from the stem and its way back."""
    bottom = bottom_layer(costs)
    for layer in range(costs.head, max(mode.first_held(costs), bottom) - 1, -1):
        yield _vjp(costs, layer, chunk)
    top = mode.top_recomputed(costs)
    if top is None:
        return
    for layer in range(top + 1):
        yield Recompute, (layer, chunk, layer >= bottom and (layer == top or layer not in mode.again))
    for layer in range(top, bottom - 1, -1):
        if layer in mode.again and layer != top:
            yield Recompute, (layer, chunk, True)
        yield _vjp(costs, layer, chunk)


def drop_after_last_use(costs: StackCosts, steps: Iterable[Step]) -> tuple[Action, ...]:
    """Actions of `steps`, each dropping the values that no later action reads.

    Walking back from the end, a value that is read and not yet wanted later is read here for the last time; one that is written
    and not wanted later is dropped at once; a write ends the want, so a value that is made twice has two lives.
    """
    wanted: set[Value] = set()
    actions: list[Action] = []
    for kind, own in reversed(list(steps)):
        step = kind(*own)
        frees: list[Value] = []
        for value in step.writes(costs):
            if value in wanted:
                wanted.discard(value)
            else:
                frees.append(value)
        for value in step.reads(costs):
            if value not in wanted:
                wanted.add(value)
                frees.append(value)
        actions.append(kind(*own, frees=tuple(frees)) if frees else step)
    actions.reverse()
    return tuple(actions)


def _vjp(costs: StackCosts, layer: int, chunk: int) -> Step:
    """The VJP of one tile."""
    return (HeadVjp, (chunk,)) if layer == costs.head else (Adjoint, (layer, chunk))
