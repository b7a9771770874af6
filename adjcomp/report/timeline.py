"""When each action of a plan runs, and what is live meanwhile: what the page and the trace draw.

The verifier's machine runs the plan; this module looks at it before and after each action.
"""

from __future__ import annotations

from dataclasses import dataclass

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, HeadVjp, Loss, Publish, Recompute
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.kinds import KIND_NAMES
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.plan import Plan
from adjcomp.ir.replay import Replay
from adjcomp.ir.rules import BrokenRule
from adjcomp.ir.summaries import RangeAction
from adjcomp.ir.transfers import Fetch, Load, Offload, Sum

FIXED, WORKSPACE = "model, inputs, gradients", "workspace"
SERIES = (FIXED, *dict.fromkeys(KIND_NAMES.values()), WORKSPACE)  # what the bytes of a moment are divided into
_PLACE = {kind: SERIES.index(name) for kind, name in KIND_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Moment:
    """One action. start, seconds: predicted, from the beginning of the step. sizes: bytes live at its peak, as in `SERIES`.

    copied: begin and end of the copy that an Offload, a Fetch or a Load starts; it runs beside the computations.
    """

    action: Action
    start: float
    seconds: float
    sizes: tuple[int, ...]
    copied: tuple[float, float] | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes live at the peak of the action."""
        return sum(self.sizes)


def timelines(plan: Plan) -> tuple[list[Moment], ...]:
    """The actions of every device in their order.

    Raises:
        VerifyError: an action can't run.
    """
    machine = Replay(plan)
    found: tuple[list[Moment], ...] = tuple([] for _ in plan.shares)
    ends = [0.0 for _ in plan.shares]
    for action in plan.actions:
        device = action.device
        sizes = [0] * len(SERIES)
        for kind, size in machine.held[device].items():
            sizes[_PLACE[kind]] += size
        before, fixed = machine.bytes[device], machine.fixed[device]
        try:
            machine.step(action)
        except BrokenRule as broken:
            raise VerifyError(f"this plan can't run: {broken}; plan.verify() shows where") from None
        sizes[0] = max(fixed, machine.fixed[device])  # a publication ends with less than it began with
        beside = machine.section.extra_bytes if machine.section is not None else 0
        sizes[-1] = max(_workspace(plan.costs, action), machine.bytes[device] - before, beside)
        seconds = action.seconds(plan.costs) / plan.shares[device].speed
        ends[device] = ends[device] + seconds if machine.clock is None else machine.clock.free[device]
        copied = machine.clock.copied if isinstance(action, Offload | Fetch | Load) and machine.clock is not None else None
        found[device].append(Moment(action, ends[device] - seconds, seconds, tuple(sizes), copied))
    return found


def layer_of(costs: StackCosts, action: Action) -> int | None:
    """The layer that an action works on; None for those that work on none or on several."""
    match action:
        case Forward(layer=layer) | Recompute(layer=layer) | Advance(layer=layer) | Adjoint(layer=layer):
            return layer
        case Publish(layer=layer) | Sum(layer=layer):
            return layer
        case Loss() | HeadVjp():
            return costs.head
        case Offload(value=value) | Fetch(value=value) | Load(value=value):
            return value.layer
        case Narrow(layer=layer) | Widen(layer=layer) | RangeAction(layer=layer):
            return layer
    return None


def chunk_of(action: Action) -> int | None:
    """The chunk that an action works on; None for those that work on none."""
    match action:
        case Forward(chunk=chunk) | Recompute(chunk=chunk) | Advance(chunk=chunk) | Adjoint(chunk=chunk):
            return chunk
        case Loss(chunk=chunk) | HeadVjp(chunk=chunk) | RangeAction(chunk=chunk):
            return chunk
        case Offload(value=value) | Fetch(value=value) | Load(value=value):
            return value.chunk
    return None


def _workspace(costs: StackCosts, action: Action) -> int:
    """Extra bytes at the peak of an action beside what it leaves, over what is live when it starts."""
    layer, chunk = layer_of(costs, action), chunk_of(action)
    if isinstance(action, Publish):
        return costs.publish_bytes[action.layer]
    if layer is None or chunk is None or isinstance(action, Offload | Fetch | Load):
        return 0
    if isinstance(action, RangeAction):
        return action.workspace_bytes(costs)
    tile = costs.tile(layer, chunk)
    match action:
        case Adjoint() | HeadVjp():
            return tile.adjoint_workspace_bytes
        case Forward(keep=True) | Recompute(keep=True) | Loss(keep=True):
            return tile.keep_workspace_bytes
    return tile.forward_workspace_bytes
