"""When each action of a plan runs, and what is live meanwhile: what the page and the trace draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, HeadVjp, Loss, Publish, Recompute, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.kinds import KIND_NAMES
from adjcomp.ir.plan import Plan, total
from adjcomp.ir.values import Kind, Value, value_bytes

FIXED, WORKSPACE = "model, inputs, gradients", "workspace"
SERIES = (FIXED, *dict.fromkeys(KIND_NAMES.values()), WORKSPACE)  # what the bytes of a moment are divided into


@dataclass(frozen=True, slots=True)
class Moment:
    """One action. start, seconds: predicted, from the beginning of the step. sizes: bytes live at its peak, as in `SERIES`."""

    action: Action
    start: float
    seconds: float
    sizes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes live at the peak of the action."""
        return sum(self.sizes)


def layer_of(costs: StackCosts, action: Action) -> int | None:
    """The layer that an action works on; None for the start and the turn."""
    match action:
        case Forward(layer=layer) | Recompute(layer=layer) | Advance(layer=layer) | Adjoint(layer=layer) | Publish(layer=layer):
            return layer
        case Loss() | HeadVjp():
            return costs.head
    return None


def chunk_of(action: Action) -> int | None:
    """The chunk that an action works on; None for those that work on none."""
    match action:
        case Forward(chunk=chunk) | Recompute(chunk=chunk) | Advance(chunk=chunk) | Adjoint(chunk=chunk):
            return chunk
        case Loss(chunk=chunk) | HeadVjp(chunk=chunk):
            return chunk
    return None


@dataclass(frozen=True, slots=True)
class _Effect:
    """What an action adds: bytes by place in `SERIES`, workspace, seconds."""

    made: tuple[tuple[int, int], ...]
    workspace: int
    seconds: float


class _Effects:
    """Effects and sizes, looked up once for all inner chunks."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self.last = costs.chunk_count - 1
        self._effects: dict[tuple[object, ...], _Effect] = {}
        self._sizes: dict[tuple[Kind, int, bool], int] = {}

    def of(self, action: Action) -> _Effect:
        """The effect of an action."""
        chunk = chunk_of(action)
        # Chunk 0 makes the adjoint of the initial state, whose size is that of chunk 0: only the last chunk differs.
        key = (type(action), layer_of(self.costs, action), chunk == self.last, _keeps(action))
        if key not in self._effects:
            made = tuple((_PLACE[value.kind], value_bytes(self.costs, value)) for value in action.writes(self.costs))
            self._effects[key] = _Effect(made, _workspace(self.costs, action), action.seconds(self.costs))
        return self._effects[key]

    def size(self, value: Value) -> int:
        """Bytes of a value."""
        key = (value.kind, value.layer, value.chunk == self.last)
        if key not in self._sizes:
            self._sizes[key] = value_bytes(self.costs, value)
        return self._sizes[key]


_PLACE = {kind: SERIES.index(name) for kind, name in KIND_NAMES.items()}


def timeline(plan: Plan, device: int) -> Iterator[Moment]:
    """The actions of one device in their order, one after the other."""
    share = plan.shares[device]
    effects = _Effects(plan.costs)
    live = [0] * (len(SERIES) - 1)
    live[0] = total(share.resident_bytes)
    clock = 0.0
    for action in plan.actions:
        if action.device != device:
            continue
        if isinstance(action, Turn):
            live[0] += total(share.turn_bytes)
        effect = effects.of(action)
        gone = [(_PLACE[value.kind], effects.size(value)) for value in action.frees]
        change = sum([size for _, size in effect.made]) - sum([size for _, size in gone])
        yield Moment(action, clock, effect.seconds, (*live, max(effect.workspace, change)))
        for place, size in effect.made:
            live[place] += size
        for place, size in gone:
            live[place] -= size
        clock += effect.seconds


def _keeps(action: Action) -> bool:
    match action:
        case Forward(keep=keep) | Recompute(keep=keep) | Loss(keep=keep):
            return keep
    return False


def _workspace(costs: StackCosts, action: Action) -> int:
    """Extra bytes at the peak of an action, over what is live when it starts."""
    layer, chunk = layer_of(costs, action), chunk_of(action)
    if isinstance(action, Publish):
        return costs.publish_bytes[action.layer]
    if layer is None or chunk is None:
        return sum(value_bytes(costs, value) for value in action.writes(costs))
    tile = costs.tile(layer, chunk)
    if isinstance(action, Adjoint | HeadVjp):
        return tile.adjoint_workspace_bytes
    return tile.keep_workspace_bytes if _keeps(action) else tile.forward_workspace_bytes
