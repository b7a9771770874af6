"""What actions do, looked up once for each kind of action on a layer: the chunks beside the last are all alike.

Values are given relative to the action's chunk. A plan has a million actions, so this is where planning spends its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Free, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.summaries import (
    AdjointSettle,
    AdjointSummarize,
    Adopt,
    Detach,
    RangeAction,
    Settle,
    SplitHalo,
    Summarize,
    Tail,
    TailVjp,
)
from adjcomp.ir.transfers import Fetch, Load, Offload, Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value, value_bytes

Relative = tuple[Kind, int, int]  # kind, layer, chunk relative to the action's
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one action does."""

    reads: tuple[Relative, ...]
    writes: tuple[Relative, ...]
    made: tuple[tuple[Kind, int], ...]  # kind and bytes of what it writes
    made_bytes: int
    workspace: int  # bytes beside what was live when it started
    seconds: float


_KEYS: dict[type[Action], Callable[[Any, int], Key]] = {
    Forward: lambda action, last: (Forward, action.layer, action.keep, action.chunk == last),
    Recompute: lambda action, last: (Recompute, action.layer, action.keep, action.chunk == last),
    Adjoint: lambda action, last: (Adjoint, action.layer, action.chunk == last),
    Advance: lambda action, last: (Advance, action.layer, action.chunk == last),
    Loss: lambda action, last: (Loss, action.keep, action.chunk == last),
    HeadVjp: lambda action, last: (HeadVjp, action.chunk == last),
    Narrow: lambda action, last: (Narrow, action.layer, action.chunk == last),
    Widen: lambda action, last: (Widen, action.layer, action.chunk == last),
    Tail: lambda action, last: (Tail, action.layer),
    Summarize: lambda action, last: (Summarize, action.layer, action.chunk == action.first),
    Settle: lambda action, last: (Settle, action.layer, action.chunk - action.first),
    Adopt: lambda action, last: (Adopt, action.layer),
    AdjointSummarize: lambda action, last: (AdjointSummarize, action.layer, action.chunk == action.last),
    AdjointSettle: lambda action, last: (AdjointSettle, action.layer, action.last - action.chunk),
    Detach: lambda action, last: (Detach, action.layer),
    SplitHalo: lambda action, last: (SplitHalo, action.layer),
    TailVjp: lambda action, last: (TailVjp, action.layer),
}


NOTHING = Recipe((), (), (), 0, 0, 0.0)


class Recipes:
    """The recipes of one stack."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self.last = costs.chunk_count - 1
        self._known: dict[Key, Recipe] = {}
        self._sizes: dict[tuple[Kind, int, bool], int] = {}

    def of(self, action: Action) -> tuple[Recipe, int]:
        """The recipe of `action`, and the chunk that its values are relative to."""
        key_of = _KEYS.get(type(action))
        if key_of is not None:
            chunk: int = action.chunk  # type: ignore[attr-defined]
            key = key_of(action, self.last)
        elif isinstance(action, Send | Receive | Offload | Fetch | Load):
            kind, layer, chunk = action.value
            key = (type(action), kind, layer, chunk == self.last)
        elif type(action) is Free:
            return NOTHING, 0
        else:
            return self._made(action, 0), 0
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(action, chunk)
        return found, chunk

    def size(self, value: Value) -> int:
        """Bytes of `value`."""
        key = (value[0], value[1], value[2] == self.last)
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = value_bytes(self.costs, value)
        return found

    def _made(self, action: Action, chunk: int) -> Recipe:
        written = action.writes(self.costs)
        made = tuple((value.kind, value_bytes(self.costs, value)) for value in written)
        return Recipe(
            tuple((kind, layer, c - chunk) for kind, layer, c in action.reads(self.costs)),
            tuple((kind, layer, c - chunk) for kind, layer, c in written),
            made,
            sum(size for _, size in made),
            workspace_bytes(self.costs, action),
            action.seconds(self.costs),
        )


def workspace_bytes(costs: StackCosts, action: Action) -> int:
    """Extra peak while `action` runs, over what was live when it started."""
    match action:
        case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
            tile = costs.tile(layer, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Loss(chunk=chunk, keep=keep):
            tile = costs.tile(costs.head, chunk)
            return tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
        case Advance(layer=layer, chunk=chunk):
            return costs.tile(layer, chunk).forward_workspace_bytes
        case Adjoint(layer=layer, chunk=chunk):
            return costs.tile(layer, chunk).adjoint_workspace_bytes
        case HeadVjp(chunk=chunk):
            return costs.tile(costs.head, chunk).adjoint_workspace_bytes
        case RangeAction():
            return action.workspace_bytes(costs)
        case Publish(layer=layer):
            return costs.publish_bytes[layer]
        case Free() | Fork() | Join() | Send() | Sum() | SumTied() | Offload():
            return 0
        case Start() | Turn() | Narrow() | Widen() | Receive() | Fetch() | Load():
            return sum(value_bytes(costs, value) for value in action.writes(costs))
    raise TypeError(f"no workspace rule for {type(action).__name__}")
