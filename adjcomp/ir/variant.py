"""Which gradient a plan computes: backpropagation's, or one of the two approximations of adjoint sharding.

The residual form (Proposition 3 of the paper) reads each layer's input as a constant, so that no cotangent travels from a
layer's branch to the layers below: every layer sees the cotangent of the stream's end. The truncated form (its Equation 7) lets
the output at step t reach the transitions and inputs of steps t - W + 1 … t only; what reads the state (C) is untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Coupling(StrEnum):
    """How the backward of one layer depends on that of the layers above it."""

    EXACT = "exact"  # backpropagation
    RESIDUAL = "residual"  # layer inputs are constants: the cotangent passes through the identity path alone


@dataclass(frozen=True)
class Variant:
    """A choice of gradient. adjoint_window: steps that the adjoint of one output reaches back, itself included; None for all."""

    coupling: Coupling = Coupling.EXACT
    adjoint_window: int | None = None

    @property
    def approximate(self) -> bool:
        """Whether gradients differ from backpropagation's."""
        return self.coupling is not Coupling.EXACT or self.adjoint_window is not None

    def at(self, seq_len: int) -> Variant:
        """The same choice for a sequence: a window as long as the sequence cuts nothing off."""
        whole = self.adjoint_window is not None and self.adjoint_window >= seq_len
        return Variant(self.coupling, None) if whole else self

    def __str__(self) -> str:
        parts = []
        if self.coupling is Coupling.RESIDUAL:
            parts.append("coupling='residual': layer inputs are constants, nothing flows back through the branches above")
        if self.adjoint_window is not None:
            parts.append(f"adjoint_window={self.adjoint_window}: no output reaches back further through a recurrence")
        return "; ".join(parts) if parts else "exact: the gradient of backpropagation"


EXACT = Variant()
