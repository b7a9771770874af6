"""How each tile comes by the internals that its VJP needs: the choices of the planner, one `ColumnMode` a chunk."""

from __future__ import annotations

from dataclasses import dataclass

from adjcomp.ir.costs import StackCosts


@dataclass(frozen=True)
class ColumnMode:
    """Modes of the tiles of one chunk.

    The top `held` tiles (the head counts) keep their internals from the forward on. When the backward reaches the chunk, the
    tiles below are run again in one pass from the stem; those in `again` keep only their input in that pass and are run once
    more just before their adjoint, the others keep their internals. Where nothing is held, the head may still leave its internals
    in the forward, a number or two a token: then the pass brings its input again, and it need not run again itself.
    """

    held: int
    again: frozenset[int] = frozenset()
    noted: bool = False  # the head left its internals although its input was dropped; held is 0

    def first_held(self, costs: StackCosts) -> int:
        """The lowest layer that is held; head + 1 when none is."""
        return costs.head + 1 - self.held

    def top_recomputed(self, costs: StackCosts) -> int | None:
        """The highest layer that the pass runs; None when every VJP finds its internals held."""
        top = self.first_held(costs) - 1
        return top if top >= bottom_layer(costs) else None


def bottom_layer(costs: StackCosts) -> int:
    """The lowest layer with a VJP.

    Raises:
        ValueError: no layer has one, so there is no backward pass to plan.
    """
    for layer in range(costs.head + 1):
        if costs.tile(layer, 0).has_vjp:
            return layer
    raise ValueError("nothing in this model takes a gradient, so there is no backward pass to plan")
