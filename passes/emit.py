"""Modes to actions: the order in which one device runs a step.

The order is time-major: all layers of chunk 0, of chunk 1, …, then back. Columns with equal modes run the same actions on other
chunks, so what they drop is found once for each mode, on a sequence of at most three chunks, and shifted in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode, bottom_layer
from adjcomp.passes.lifetimes import drop_after_last_use, moved


@dataclass(frozen=True)
class Column:
    """The actions of one column in one direction, as they are for chunk `chunk`."""

    actions: tuple[Action, ...]
    chunk: int

    def at(self, chunk: int) -> list[Action]:
        """The same actions for another chunk."""
        shift = chunk - self.chunk
        return [moved(action, chunk, shift) for action in self.actions]


def emit(costs: StackCosts, modes: Sequence[ColumnMode]) -> tuple[Action, ...]:
    """The actions of a step; `modes[c]` says what chunk c keeps.

    Raises:
        ValueError: there are not as many modes as chunks, or a mode holds tiles that have no VJP.
    """
    check_modes(costs, modes)
    made: dict[tuple[ColumnMode, bool, bool], tuple[Column, Column]] = {}
    last = costs.chunk_count - 1
    columns = []
    for chunk, mode in enumerate(modes):
        key = (mode, chunk == 0, chunk == last)
        if key not in made:
            made[key] = _columns(costs, mode, chunk)
        columns.append(made[key])
    return whole_step(costs, [Start(0, costs.head)], columns)


def whole_step(costs: StackCosts, start: Sequence[Action], columns: Sequence[tuple[Column, Column]]) -> tuple[Action, ...]:
    """A step: `start`, the forwards of all columns, the turn, their backwards from the last chunk on, and the gradients."""
    actions = list(start)
    for chunk, (forward, _) in enumerate(columns):
        actions.extend(forward.at(chunk))
    actions.append(Turn(0, costs.head))
    for chunk in range(len(columns) - 1, -1, -1):
        actions.extend(columns[chunk][1].at(chunk))
    if costs.gradients and len(columns) == 1:
        return tuple(published_at_once(costs, actions))
    actions.extend(publications(costs))
    return tuple(actions)


def published_at_once(costs: StackCosts, actions: Sequence[Action]) -> Iterator[Action]:
    """`actions`, with the gradients of each layer handed out right after its VJP of chunk 0, the last one of a layer."""
    for action in actions:
        yield action
        if isinstance(action, Adjoint | HeadVjp) and action.chunk == 0:
            yield Publish(costs.head if isinstance(action, HeadVjp) else action.layer)


def check_modes(costs: StackCosts, modes: Sequence[ColumnMode]) -> None:
    """ValueError for modes that don't belong to `costs`."""
    if len(modes) != costs.chunk_count:
        raise ValueError(f"{costs.chunk_count} chunks need as many modes, not {len(modes)}")
    most = costs.head + 1 - bottom_layer(costs)
    if any(not 0 <= mode.held <= most for mode in modes):
        raise ValueError(f"a chunk can hold between 0 and {most} tiles")
    if any(mode.noted and mode.held for mode in modes):
        raise ValueError("a chunk that holds tiles holds the head's input too")


def _columns(costs: StackCosts, mode: ColumnMode, chunk: int) -> tuple[Column, Column]:
    """Forward and backward of a column like `chunk`, from the shortest sequence in which it has the same neighbours."""
    count = min(costs.chunk_count, 3)
    place = 0 if chunk == 0 else count - 1 if chunk == costs.chunk_count - 1 else 1
    actions = drop_after_last_use(replace(costs, chunk_count=count), list(_time_major(costs, [mode] * count)))
    turn = next(index for index, action in enumerate(actions) if isinstance(action, Turn))
    mine = [[a for a in part if isinstance(a, _TILE_ACTIONS) and a.chunk == place] for part in (actions[:turn], actions[turn:])]
    return Column(tuple(mine[0]), place), Column(tuple(mine[1]), place)


_TILE_ACTIONS = (Forward, Loss, Recompute, HeadVjp, Adjoint)


def _time_major(costs: StackCosts, modes: Sequence[ColumnMode]) -> Iterator[Action]:
    """The actions of one device in order, without what they drop."""
    yield from _forward(costs, modes)
    for chunk in range(len(modes) - 1, -1, -1):
        yield from backward_column(costs, chunk, modes[chunk])
    yield from publications(costs)


def _forward(costs: StackCosts, modes: Sequence[ColumnMode]) -> Iterator[Action]:
    """From the start to the turn."""
    yield Start(0, costs.head)
    for chunk, mode in enumerate(modes):
        yield from forward_column(costs, chunk, mode)
    yield Turn(0, costs.head)


def forward_column(costs: StackCosts, chunk: int, mode: ColumnMode) -> Iterator[Action]:
    """The forward of one chunk."""
    first = mode.first_held(costs)
    for layer in range(costs.head):
        yield Forward(layer, chunk, layer >= first)
    yield Loss(chunk, first <= costs.head or mode.noted)


def publications(costs: StackCosts) -> Iterator[Action]:
    """The gradients of every layer, once all adjoints are done."""
    return (Publish(layer) for layer in range(costs.head, bottom_layer(costs) - 1, -1))


def backward_column(costs: StackCosts, chunk: int, mode: ColumnMode) -> Iterator[Action]:
    """The backward of one chunk: held tiles first, which frees what they held, then the pass from the stem and its way back."""
    bottom = bottom_layer(costs)
    for layer in range(costs.head, max(mode.first_held(costs), bottom) - 1, -1):
        yield vjp(costs, layer, chunk)
    top = mode.top_recomputed(costs)
    if top is None:
        return
    for layer in range(top if mode.noted else top + 1):
        yield Recompute(layer, chunk, layer >= bottom and (layer == top or layer not in mode.again))
    for layer in range(top, bottom - 1, -1):
        if layer in mode.again and layer != top:
            yield Recompute(layer, chunk, True)
        yield vjp(costs, layer, chunk)


def vjp(costs: StackCosts, layer: int, chunk: int) -> Action:
    """The VJP of one tile."""
    return HeadVjp(chunk) if layer == costs.head else Adjoint(layer, chunk)
