"""The verifier's account of gradients: where they are known by layer, each is there from its first VJP on.

Until all layers that add to a gradient are published it is an accumulator; then it has the dtype of its parameters. Where plans
have several devices, or gradients aren't known by layer, all accumulators are there from the Turn on.
"""

from __future__ import annotations

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Share
from adjcomp.ir.residency import GRADIENTS
from adjcomp.ir.rules import BrokenRule


class Accumulators:
    """The gradients of one device."""

    def __init__(self, costs: StackCosts, share: Share, *, alone: bool) -> None:
        self.gradients = costs.gradients if alone else ()
        self.turn = dict(share.turn_bytes)  # what the Turn makes
        if self.gradients:
            self.turn[GRADIENTS] = 0
        self.made = [False for _ in self.gradients]
        self.unpublished = [set(gradient.layers) for gradient in self.gradients]
        self.said = share.turn_bytes.get(GRADIENTS, 0)

    def check(self) -> None:
        """BrokenRule where the gradients of layers are not all that the device is said to have, or grow when published."""
        known = sum(gradient.accumulator_bytes for gradient in self.gradients)
        if self.gradients and known != self.said:
            raise BrokenRule(f"gradients take {self.said} bytes, but {known} by layer")
        for gradient in self.gradients:
            if gradient.published_bytes > gradient.accumulator_bytes:
                raise BrokenRule(f"the gradients of layers {', '.join(map(str, gradient.layers))} grow when they are published")

    def reversed(self, layer: int) -> int:
        """A VJP of a layer starts: bytes of the accumulators that it makes."""
        return sum(self._made(index) for index in self._of(layer) if not self.made[index])

    def published(self, layer: int) -> int:
        """A layer has been published: bytes by which gradients have grown."""
        change = 0
        for index in self._of(layer):
            self.unpublished[index].discard(layer)
            if not self.unpublished[index]:
                change += self._add(self.gradients[index].published_bytes - self.gradients[index].accumulator_bytes)
        return change

    def _of(self, layer: int) -> list[int]:
        return [index for index, gradient in enumerate(self.gradients) if layer in gradient.layers]

    def _made(self, index: int) -> int:
        self.made[index] = True
        return self._add(self.gradients[index].accumulator_bytes)

    def _add(self, size: int) -> int:
        self.turn[GRADIENTS] += size
        return size
