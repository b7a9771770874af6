"""When each value is dropped: by the last action that reads or writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Recompute, own_fields
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.ir.values import Kind, Value
from adjcomp.passes.recipes import Recipes

NONE: tuple[Value, ...] = ()
_Mover = Callable[[Any, int, tuple[Value, ...]], Action]  # an action, its new chunk and what it drops there


def drop_after_last_use(
    costs: StackCosts,
    actions: Sequence[Action],
    waits: Mapping[int, Sequence[Value]] | None = None,
    later: Iterable[Value] = (),
    recipes: Recipes | None = None,
) -> tuple[Action, ...]:
    """`actions` of one device, each dropping the values that no later one reads.

    Walking back from the end, a value that is read and not yet wanted later is read here for the last time; one that is written
    and not wanted later is dropped at once; a write ends the want, so a value that is made twice has two lives. `waits` are
    further values that the action at an index counts as reading: those on their way to another device, which it may drop. `later`
    are values that are read after the last of `actions`. `recipes`: those of `costs`, where they are known already.
    """
    wanted: set[tuple[Kind, int, int]] = set(later)
    found: list[Action] = []
    recipes = Recipes(costs) if recipes is None else recipes
    waits = waits or {}
    for index in range(len(actions) - 1, -1, -1):
        action = actions[index]
        recipe, chunk = recipes.of(action)
        frees: list[Value] = []
        for kind, layer, offset in recipe.writes:
            value = (kind, layer, chunk + offset)
            if value in wanted:
                wanted.discard(value)
            else:
                frees.append(Value(*value))
        for kind, layer, offset in recipe.reads:
            value = (kind, layer, chunk + offset)
            if value not in wanted:
                wanted.add(value)
                frees.append(Value(*value))
        for waited in waits.get(index, NONE):
            if waited not in wanted:
                wanted.add(waited)
                frees.append(waited)
        found.append(dropping(action, tuple(frees)) if frees else action)
    found.reverse()
    return tuple(found)


def dropping(action: Action, frees: tuple[Value, ...]) -> Action:
    """`action` with other `frees`."""
    kind = type(action)
    own = [getattr(action, name) for name in own_fields(kind)]
    return kind(*own, device=action.device, stream=action.stream, frees=frees)


def on_device(action: Action, device: int) -> Action:
    """`action` on `device`."""
    if action.device == device:
        return action
    kind = type(action)
    own = [getattr(action, name) for name in own_fields(kind)]
    return kind(*own, device=device, stream=action.stream, frees=action.frees)


def moved(action: Action, chunk: int, shift: int) -> Action:
    """An action of a column, on its own chunk or one beside it, for the column of `chunk` instead of `chunk` - `shift`."""
    kind = type(action)
    frees = tuple([_value(Value, (what, layer, c + shift)) for what, layer, c in action.frees]) if action.frees else NONE
    again = _MOVED.get(kind)
    if again is not None:
        return again(action, chunk, frees)
    if isinstance(action, Offload | Fetch | Load):
        what, layer, c = action.value
        return replace(action, value=Value(what, layer, c + shift), frees=frees)
    if isinstance(action, Narrow | Widen):
        return replace(action, chunk=action.chunk + shift, frees=frees)
    own = [chunk if name == "chunk" else getattr(action, name) for name in own_fields(kind)]
    return kind(*own, device=action.device, stream=action.stream, frees=frees)


_value: Callable[[type[Value], tuple[Kind, int, int]], Value] = tuple.__new__  # past the named tuple's own, which is slower


def _with_layer(kind: Any) -> _Mover:
    return lambda a, chunk, frees: kind(a.layer, chunk, device=a.device, stream=a.stream, frees=frees)


def _with_keep(kind: Any) -> _Mover:
    return lambda a, chunk, frees: kind(a.layer, chunk, a.keep, device=a.device, stream=a.stream, frees=frees)


# The kinds that plans have by the hundred thousand.
_MOVED: dict[type[Action], _Mover] = {
    Forward: _with_keep(Forward),
    Recompute: _with_keep(Recompute),
    Advance: _with_layer(Advance),
    Adjoint: _with_layer(Adjoint),
}
