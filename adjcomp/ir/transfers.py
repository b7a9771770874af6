"""Actions between devices, and between a device and its host; the closed set of all actions.

How they take time: a device runs its actions in the plan's order. A computation starts when the one before it has ended and
what it reads has arrived. `Send` and `Receive` take no time of their device; they are issued when the computation before them
has ended. The transfer starts when both sides are issued and the way between the two devices is free. A computation that drops
a value on its way to another device ends no earlier than that transfer. `Sum` and `SumTied` take no time of their devices either:
a sum starts when every device that takes part has come to it and the sums before have ended on all of them. A `Publish` starts
when all sums that its device has come to have ended.

`Offload` and `Fetch` move values between a device and its host as `Send` and `Receive` do between devices: they take no time of
the device, each direction moves one value after the other, and a fetch starts when its value has reached the host. The bytes of
an offloaded value count on the device until a computation drops it, which waits for the copy, and on the host from the `Offload`
until a computation reads the fetched value, which waits for that copy. `Load` is a `Fetch` that leaves the value on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from adjcomp.ir.actions import (
    Action,
    Adjoint,
    Advance,
    Forward,
    Free,
    HeadVjp,
    Loss,
    Mark,
    Publish,
    Recompute,
    Start,
    Turn,
)
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.summaries import (
    AdjointSettle,
    AdjointSummarize,
    Adopt,
    Detach,
    Settle,
    SplitHalo,
    Summarize,
    Tail,
    TailVjp,
)
from adjcomp.ir.values import Value


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Read as: hand `value` to device `to`; it stays here until a later computation drops it."""

    value: Value
    to: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (self.value,)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Receive(Action):
    """Read as: make room for `value`, which device `source` sends."""

    value: Value
    source: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (self.value,)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Sum(Mark):
    """Read as: begin to add the gradients of layer over all devices that hold it; nothing of this device adds to them any more.

    Parameters that lower layers share are added up with the lowest of those.
    """

    layer: int
    size: int  # bytes of the gradients


@dataclass(frozen=True, slots=True)
class SumTied(Mark):
    """Read as: begin to add the gradients of the parameters in `costs.ties[tie]` over the devices that have one of its layers."""

    tie: int


@dataclass(frozen=True, slots=True)
class Offload(Action):
    """Read as: copy `value` to pinned host memory; it stays on the device until a later computation drops it."""

    value: Value

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (self.value,)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Fetch(Action):
    """Read as: make room for `value` on the device and bring it back from the host, which forgets it."""

    value: Value

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (self.value,)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Read as: make room for `value` on the device and bring a copy of it from the host, which keeps it."""

    value: Value

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (self.value,)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


_TILES = (Start, Forward, Loss, Turn, Recompute, Advance, HeadVjp, Adjoint, Free, Publish)
_RANGES = (Tail, Summarize, Settle, Adopt, AdjointSummarize, AdjointSettle, Detach, SplitHalo, TailVjp)
_SET = (*_TILES, *_RANGES, Narrow, Widen, Fork, Join, Send, Receive, Sum, SumTied, Offload, Fetch, Load)
ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in _SET}
