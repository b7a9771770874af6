"""When each value is dropped: by the last action that reads or writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adjcomp.ir.actions import Action, Publish, own_fields
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.transfers import Receive, Send
from adjcomp.ir.values import Value

NONE: tuple[Value, ...] = ()


def drop_after_last_use(
    costs: StackCosts, actions: Sequence[Action], waits: Mapping[int, Sequence[Value]] | None = None
) -> tuple[Action, ...]:
    """`actions` of one device, each dropping the values that no later one reads.

    Walking back from the end, a value that is read and not yet wanted later is read here for the last time; one that is written
    and not wanted later is dropped at once; a write ends the want, so a value that is made twice has two lives. `waits` are
    further values that the action at an index counts as reading: those on their way to another device, which it may drop.
    """
    wanted: set[Value] = set()
    found: list[Action] = []
    uses = _Uses(costs)
    waits = waits or {}
    for index in range(len(actions) - 1, -1, -1):
        action = actions[index]
        reads, writes = uses.of(action)
        frees: list[Value] = []
        for value in writes:
            if value in wanted:
                wanted.discard(value)
            else:
                frees.append(value)
        for value in (*reads, *waits.get(index, NONE)):
            if value not in wanted:
                wanted.add(value)
                frees.append(value)
        found.append(dropping(action, tuple(frees)) if frees else action)
    found.reverse()
    return tuple(found)


def dropping(action: Action, frees: tuple[Value, ...]) -> Action:
    """`action` with other `frees`."""
    kind = type(action)
    own = [getattr(action, name) for name in own_fields(kind)]
    return kind(*own, device=action.device, stream=action.stream, frees=frees)


def on_device(action: Action, device: int) -> Action:
    """`action` on another device."""
    kind = type(action)
    own = [getattr(action, name) for name in own_fields(kind)]
    return kind(*own, device=device, stream=action.stream, frees=action.frees)


def moved(action: Action, chunk: int, shift: int) -> Action:
    """An action on a tile, for `chunk` instead of `chunk` - `shift`."""
    kind = type(action)
    own = [chunk if name == "chunk" else getattr(action, name) for name in own_fields(kind)]
    frees = tuple([Value(what, layer, c + shift) for what, layer, c in action.frees])
    return kind(*own, device=action.device, stream=action.stream, frees=frees)


class _Uses:
    """What actions read and write, looked up once for each layer: the chunks beside the ends are all alike."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self.last = costs.chunk_count - 1
        self._known: dict[tuple[object, ...], tuple[tuple[Value, ...], tuple[Value, ...], int]] = {}

    def of(self, action: Action) -> tuple[Sequence[Value], Sequence[Value]]:
        """Reads and writes of `action`."""
        kind = type(action)
        if kind is Send or kind is Receive or kind is Publish or "chunk" not in own_fields(kind):
            return action.reads(self.costs), action.writes(self.costs)
        chunk: int = action.chunk  # type: ignore[attr-defined]
        key = (kind, chunk == self.last, *[getattr(action, name) for name in own_fields(kind) if name != "chunk"])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (action.reads(self.costs), action.writes(self.costs), chunk)
        reads, writes, at = found
        if chunk == at:
            return reads, writes
        shift = chunk - at
        return [Value(what, k, c + shift) for what, k, c in reads], [Value(what, k, c + shift) for what, k, c in writes]
