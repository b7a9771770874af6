"""The actions of a time placement whose ranges are joined by summaries.

All devices take one layer after the other. A range first says what it does to any state, so the states before all ranges are
known soon after; then it runs. The first range needs no summary, nor does the last: one knows what comes in, nobody comes after
the other. So both do as if ranges handed states on, and those between, in this order:

    forward    Tail, its halos to the next device; Summarize chunk by chunk; Settle, the state to the next device; Forward
    backward   Recompute the internals of the whole range, where the forward kept none; AdjointSummarize; AdjointSettle, the
               adjoint state to the one before; Adjoint; SplitHalo, the halos' cotangent to the device before; TailVjp for what
               the next device sends
"""

from __future__ import annotations

from adjcomp.ir.actions import Action, Forward, Loss, Recompute, Turn
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
from adjcomp.ir.values import adjoint, carry, halo, halo_adjoint
from adjcomp.passes.emit import vjp
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.rangelist import RangeList
from adjcomp.passes.place.ranges import Ranges


def joined_actions(problem: Problem, plan: Ranges, device: int) -> tuple[Action, ...]:
    """The actions of one device in its order; none where it has no chunks."""
    if plan.cuts[device] == plan.cuts[device + 1]:
        return ()
    own = _Joined(RangeList(problem, plan, device))
    own.forward()
    for layer in range(problem.head, -1, -1):
        own.backward(layer)
        own.list.add_up(layer)
    return own.list.finish()


class _Joined:
    """Writes the actions of one device."""

    def __init__(self, own: RangeList) -> None:
        self.list, self.costs = own, own.costs
        self.first, self.last = own.chunks[0], own.chunks[-1]
        self.between = own.before is not None and own.after is not None

    def forward(self) -> None:
        """All layers, each over the whole range."""
        own, head = self.list, self.costs.head
        own.start()
        for layer in range(head + 1):
            if own.before is not None and own.carries(layer):
                self._receive_states(layer, own.before)
        for layer in range(head + 1):
            if own.carries(layer):
                self._join(layer)
            for chunk in own.chunks:
                if chunk == self.last:
                    own.drop_sent()  # what was settled is made once more
                own.do(Loss(chunk, False) if layer == head else Forward(layer, chunk, own.holds(layer, chunk)))
            if own.before is None and own.after is not None and self._linear(layer):
                own.send(carry(layer, self.last), own.after)
        own.do(Turn(*own.everything(own.after is None)))
        own.drop_sent()
        for layer in range(head, -1, -1):
            if own.after is not None and own.takes_adjoint(layer):
                self._receive_adjoints(layer, own.after)

    def backward(self, layer: int) -> None:
        """Make the residual chunks that the VJPs of a layer read, and run those."""
        own = self.list
        own.advance(layer)
        if layer < own.problem.bottom:
            return
        waits = own.takes_adjoint(layer) and own.after is not None
        if waits and not self._passes_back(layer):
            own.do(Detach(layer, self.last))
        together = waits and self._passes_back(layer)
        for chunk in reversed(own.chunks) if together else ():
            self._keep(layer, chunk)
        if together and self.between:
            self._join_adjoints(layer)
        for chunk in reversed(own.chunks):
            if not together:
                self._keep(layer, chunk)
            if chunk == self.first:
                own.drop_sent()  # what was settled is made once more
            own.do(vjp(self.costs, layer, chunk))
        if own.takes_adjoint(layer):
            self._pass_back(layer)

    def _keep(self, layer: int, chunk: int) -> None:
        """Make the internals that weren't held."""
        if not self.list.holds(layer, chunk):
            self.list.do(Recompute(layer, chunk, True))

    def _join(self, layer: int) -> None:
        """What comes before the forwards of a layer: the state that comes in, and the one that goes out."""
        own = self.list
        if own.after is not None and self.costs.joins[layer].halo_bytes:
            own.do(Tail(layer, self.last))
            if self._sends_halo(layer):
                own.send(halo(layer, self.last), own.after)
        if own.before is not None and not self._linear(layer):
            own.do(Adopt(layer, self.first - 1))
        elif self.between and own.after is not None:
            for chunk in own.chunks:
                own.do(Summarize(layer, chunk, self.first))
            own.do(Settle(layer, self.last, self.first))
            own.send(carry(layer, self.last), own.after)

    def _join_adjoints(self, layer: int) -> None:
        """What comes between the recomputations of a layer and its VJPs."""
        own = self.list
        for chunk in reversed(own.chunks):
            own.do(AdjointSummarize(layer, chunk, self.last))
        own.do(AdjointSettle(layer, self.first - 1, self.last))
        if own.before is not None:
            own.send(adjoint(layer, self.first - 1), own.before)

    def _pass_back(self, layer: int) -> None:
        """What comes after the VJPs of a layer: the adjoint state of the last range, and the cotangents of halos."""
        own = self.list
        if own.before is not None and self._splits_halo(layer):
            own.do(SplitHalo(layer, self.first - 1))
            own.send(halo_adjoint(layer, self.first - 1), own.before)
        if own.after is None and own.before is not None and self._passes_back(layer):
            own.send(adjoint(layer, self.first - 1), own.before)
        if own.after is not None and self._takes_halo(layer):
            own.do(TailVjp(layer, self.last))

    def _receive_states(self, layer: int, source: int) -> None:
        """Room for what comes in, in the order in which it is sent."""
        if self.costs.joins[layer].halo_bytes and (self.between or not self._linear(layer)):
            self.list.receive(halo(layer, self.first - 1), source)
        if self._linear(layer):
            self.list.receive(carry(layer, self.first - 1), source)

    def _receive_adjoints(self, layer: int, source: int) -> None:
        """Room for what comes back, in the order in which it is sent."""
        if self._passes_back(layer):
            self.list.receive(adjoint(layer, self.last), source)
        if self._takes_halo(layer):
            self.list.receive(halo_adjoint(layer, self.last), source)

    def _linear(self, layer: int) -> bool:
        """Whether a layer has a state that summaries speak of."""
        return self.costs.joins[layer].summary_bytes > 0

    def _passes_back(self, layer: int) -> bool:
        """Whether adjoint states travel for a layer, beside the cotangents of halos."""
        return self.costs.joins[layer].adjoint_summary_bytes > 0

    def _sends_halo(self, layer: int) -> bool:
        """Whether the next device wants this range's halos before all else: not the last one, if its states come with theirs."""
        return self.list.place + 2 < self.list.holders or not self._linear(layer)

    def _takes_halo(self, layer: int) -> bool:
        """Whether the next device sends what its halos pass back: not the last one, if it is part of an adjoint state anyway."""
        apart = self.list.place + 2 < self.list.holders or not self._passes_back(layer)
        return self.costs.joins[layer].halo_adjoint_bytes > 0 and apart

    def _splits_halo(self, layer: int) -> bool:
        """The same, seen from the device that sends it."""
        apart = self.list.place + 1 < self.list.holders or not self._passes_back(layer)
        return self.costs.joins[layer].halo_adjoint_bytes > 0 and apart
