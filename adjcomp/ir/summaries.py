"""Actions that join ranges of time by summaries, so that devices work on the same layer of their ranges at once.

A range does two things to the state that comes in. Some parts of the state that it leaves, the *halos* (tails of convolutions),
are made of its last steps alone: `Tail` makes them before all else. The others are *linear*, out = P in + E: `Summarize` finds P
and E of chunk after chunk, and `Settle` hands a state through the whole range once it is known what comes in, before the range
itself has run. Backwards the same with adjoint states: VJPs are linear in the cotangents, and what goes out of a halo goes into
the last steps of the range before, afterwards, by `SplitHalo` and `TailVjp`. Chunks here have full length: the last range of a
sequence, which may end with a shorter one, hands nothing on.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from adjcomp.ir.actions import Action, vjp_reads
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import Kind, Value, adjoint, adjoint_summary, carry, cotangent, halo, halo_adjoint, stream, summary


@dataclass(frozen=True, slots=True)
class RangeAction(Action):
    """An action on a border between two ranges, or on a chunk of a range that is summarized."""

    layer: int
    chunk: int

    @abstractmethod
    def workspace_bytes(self, costs: StackCosts) -> int:
        """Extra peak while the action runs, over what was live when it started."""


@dataclass(frozen=True, slots=True)
class Tail(RangeAction):
    """Read as: from the last steps of chunk make halo[layer,chunk], the halos as they leave the range that ends there."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return _input(self.layer, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (halo(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].tail_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.joins[self.layer].tail_workspace_bytes


@dataclass(frozen=True, slots=True)
class Summarize(RangeAction):
    """Read as: what chunks first … chunk do to any state, from what those before do; at first from the halos that come in."""

    first: int  # of the range

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        if self.chunk > self.first:
            return (*_input(self.layer, self.chunk), summary(self.layer, self.chunk - 1))
        halos = (halo(self.layer, self.first - 1),) if costs.joins[self.layer].halo_bytes else ()
        return (*_input(self.layer, self.chunk), *halos)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (summary(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].summarize_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.joins[self.layer].summarize_workspace_bytes


@dataclass(frozen=True, slots=True)
class Settle(RangeAction):
    """Read as: s[layer,chunk], the state after the range first … chunk, from the one before it, its summary and its halos."""

    first: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        halos = (halo(self.layer, self.chunk),) if costs.joins[self.layer].halo_bytes else ()
        return (summary(self.layer, self.chunk), carry(self.layer, self.first - 1), *halos)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (carry(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].settle_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.tile(self.layer, self.chunk).carry_bytes


@dataclass(frozen=True, slots=True)
class Adopt(RangeAction):
    """Read as: the halos are the whole state of layer: take halo[layer,chunk] for s[layer,chunk]."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (halo(self.layer, self.chunk),)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (carry(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.tile(self.layer, self.chunk).carry_bytes


@dataclass(frozen=True, slots=True)
class AdjointSummarize(RangeAction):
    """Read as: what chunks chunk … last do to any adjoint state, from what those after chunk do; from nothing at last."""

    last: int  # of the range

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        own = tuple(value for value in vjp_reads(costs, self.layer, self.chunk) if value.kind is not Kind.ADJOINT)
        return (*own, adjoint_summary(self.layer, self.chunk)) if self.chunk < self.last else own

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (adjoint_summary(self.layer, self.chunk - 1),)

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].adjoint_summarize_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.joins[self.layer].adjoint_summarize_workspace_bytes


@dataclass(frozen=True, slots=True)
class AdjointSettle(RangeAction):
    """Read as: lam[layer,chunk], the adjoint state before the range chunk + 1 … last, from the one after it and its summary.

    It lacks what the halos pass back, which `TailVjp` adds to the gradients.
    """

    last: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return adjoint_summary(self.layer, self.chunk), adjoint(self.layer, self.last)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (adjoint(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].adjoint_settle_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.tile(self.layer, self.chunk).adjoint_bytes


@dataclass(frozen=True, slots=True)
class Detach(RangeAction):
    """Read as: only halos pass anything back: lam[layer,chunk] is zero, and `TailVjp` adds what it lacks to the gradients."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (adjoint(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.tile(self.layer, self.chunk).adjoint_bytes


@dataclass(frozen=True, slots=True)
class SplitHalo(RangeAction):
    """Read as: the part of lam[layer,chunk] that belongs to halos, as ghalo[layer,chunk], for the range that ends with chunk."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (adjoint(self.layer, self.chunk),)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (halo_adjoint(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.joins[self.layer].halo_adjoint_bytes


@dataclass(frozen=True, slots=True)
class TailVjp(RangeAction):
    """Read as: from ghalo[layer,chunk], add to the gradients of layer and to the last steps of g[layer-1,chunk], in place."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        below = (cotangent(self.layer - 1, self.chunk),) if costs.makes_cotangent(self.layer, self.chunk) else ()
        return (halo_adjoint(self.layer, self.chunk), *_input(self.layer, self.chunk), *below)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def seconds(self, costs: StackCosts) -> float:
        return costs.joins[self.layer].tail_vjp_seconds

    def workspace_bytes(self, costs: StackCosts) -> int:
        return costs.joins[self.layer].tail_vjp_workspace_bytes


def _input(layer: int, chunk: int) -> tuple[Value, ...]:
    """The residual chunk that a tile reads; the stem reads tokens."""
    return (stream(layer - 1, chunk),) if layer > 0 else ()
