"""Actions that keep borders in lower precision: an approximation, for chunks are then recomputed from rounded states.

The state that the next chunk's forward reads keeps its precision; what waits for the backward is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import Value, carry, narrow

ROUNDED = "border_dtype='bfloat16': chunks are recomputed from states rounded to bfloat16"


@dataclass(frozen=True, slots=True)
class Narrow(Action):
    """Read as: round s[layer,chunk] to bfloat16, as n[layer,chunk]; s stays until it is dropped."""

    layer: int
    chunk: int  # -1 for the initial state

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (carry(self.layer, self.chunk),)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (narrow(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Widen(Action):
    """Read as: make s[layer,chunk] again, in its own precision, from n[layer,chunk]."""

    layer: int
    chunk: int  # -1 for the initial state

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return (narrow(self.layer, self.chunk),)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return (carry(self.layer, self.chunk),)

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


def rounds_borders(actions: Iterable[Action]) -> bool:
    """Whether some borders are kept in lower precision, so that gradients differ from backpropagation's."""
    return any(isinstance(action, Narrow) for action in actions)
