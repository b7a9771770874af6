"""What lives beside the values of a plan while its actions run: residents, and gradients as they come and go."""

from __future__ import annotations

from adjcomp.ir.actions import Action, Adjoint, HeadVjp, Publish, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Share, total
from adjcomp.ir.residency import GRADIENTS


class Beside:
    """One device. `size`: bytes at the moment; `turned`: those that the Turn has brought, by kind.

    A device that is `alone` makes each gradient's accumulator at the first VJP that adds to it, where they are known by layer.
    """

    def __init__(self, costs: StackCosts, share: Share, *, alone: bool) -> None:
        self.size = total(share.resident_bytes)
        self.turned: dict[str, int] = {}
        self._turn = dict(share.turn_bytes)
        self._head = costs.head
        self._gradients = costs.gradients if alone else ()
        if self._gradients:
            self._turn[GRADIENTS] = 0
        self._to_come = set(range(len(self._gradients)))
        self._waiting = {index: set(gradient.layers) for index, gradient in enumerate(self._gradients)}

    def before(self, action: Action) -> None:
        """What is there while `action` runs."""
        if type(action) is Turn:
            self.turned = self._turn
            self.size += total(self._turn)
        elif self._to_come and isinstance(action, Adjoint | HeadVjp):
            layer = self._head if isinstance(action, HeadVjp) else action.layer
            first = {index for index in self._to_come if layer in self._gradients[index].layers}
            self._to_come -= first
            self._add(sum(self._gradients[index].accumulator_bytes for index in first))

    def after(self, action: Action) -> None:
        """What is left of gradients once `action` has run."""
        if type(action) is not Publish or not self._gradients:
            return
        for index, layers in list(self._waiting.items()):
            layers.discard(action.layer)
            if not layers:
                del self._waiting[index]
                self._add(self._gradients[index].published_bytes - self._gradients[index].accumulator_bytes)

    def _add(self, size: int) -> None:
        self.size += size
        self._turn[GRADIENTS] += size
