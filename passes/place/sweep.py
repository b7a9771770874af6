"""The actions of a time placement whose ranges hand states on: every device sweeps over its range layer by layer, up and back."""

from __future__ import annotations

from adjcomp.ir.actions import Action, Forward, Loss, Recompute, Turn
from adjcomp.ir.values import adjoint, carry
from adjcomp.passes.emit import vjp
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.rangelist import RangeList
from adjcomp.passes.place.ranges import Ranges


def sweep_actions(problem: Problem, plan: Ranges, device: int) -> tuple[Action, ...]:
    """The actions of one device in its order; none where it has no chunks."""
    if plan.cuts[device] == plan.cuts[device + 1]:
        return ()
    own = RangeList(problem, plan, device)
    _forward(own)
    for layer in range(problem.head, -1, -1):
        _backward(own, layer)
        own.add_up(layer)
    return own.finish()


def _forward(own: RangeList) -> None:
    """All layers, each over the whole range."""
    head, first, last = own.costs.head, own.chunks[0], own.chunks[-1]
    own.start()
    for layer in range(head + 1):
        if own.before is not None and own.carries(layer):
            own.receive(carry(layer, first - 1), own.before)
    for layer in range(head + 1):
        for chunk in own.chunks:
            own.do(Loss(chunk, False) if layer == head else Forward(layer, chunk, False))
        own.drop_sent()
        if own.after is not None and own.carries(layer):
            own.send(carry(layer, last), own.after)
    own.do(Turn(*own.everything(own.after is None)))
    own.drop_sent()
    for layer in range(head, -1, -1):
        if own.after is not None and own.takes_adjoint(layer):
            own.receive(adjoint(layer, last), own.after)


def _backward(own: RangeList, layer: int) -> None:
    """Make the residual chunks that the VJPs of a layer read, and run those."""
    own.advance(layer)
    if layer < own.problem.bottom:
        return
    for chunk in reversed(own.chunks):
        own.do(Recompute(layer, chunk, True))
        own.do(vjp(own.costs, layer, chunk))
    own.drop_sent()
    if own.before is not None and own.takes_adjoint(layer):
        own.send(adjoint(layer, own.chunks[0] - 1), own.before)
