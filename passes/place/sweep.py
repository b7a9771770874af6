"""The actions of a time placement: every device sweeps over its range layer by layer, up and back down."""

from __future__ import annotations

from collections.abc import Sequence

from adjcomp.ir.actions import Action, Forward, Free, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.transfers import Receive, Send, Sum
from adjcomp.ir.values import Value, adjoint, carry, has_adjoint, has_carry
from adjcomp.passes.emit import vjp
from adjcomp.passes.lifetimes import drop_after_last_use, on_device
from adjcomp.passes.place.nesting import Piece
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.ranges import Ranges


def sweep_actions(problem: Problem, plan: Ranges, device: int) -> tuple[Action, ...]:
    """The actions of one device in its order; none where it has no chunks."""
    if plan.cuts[device] == plan.cuts[device + 1]:
        return ()
    writer = _Writer(problem, plan, device)
    writer.forward()
    for layer in range(problem.head, -1, -1):
        writer.backward(layer)
    writer.finish()
    return drop_after_last_use(problem.costs, writer.actions, writer.waits)


class _Writer:
    """Writes the actions of one device."""

    def __init__(self, problem: Problem, plan: Ranges, device: int) -> None:
        self.problem, self.costs, self.device = problem, problem.costs, device
        self.chunks = range(plan.cuts[device], plan.cuts[device + 1])
        busy = [d for d in range(len(plan.cuts) - 1) if plan.cuts[d] < plan.cuts[d + 1]]
        place = busy.index(device)
        self.before = busy[place - 1] if place else None
        self.after = busy[place + 1] if place + 1 < len(busy) else None
        self.holders = len(busy)
        self.groups: list[tuple[range, dict[int, list[Piece]]]] = []  # chunks, and what comes before the VJPs of each layer
        start = self.chunks.start
        for stored, size in plan.depths[device]:
            self.groups.append((range(start, start + size), _by_layer(plan.pieces[stored], problem.head)))
            start += size
        self.actions: list[Action] = []
        self.waits: dict[int, list[Value]] = {}
        self.sent: list[Value] = []

    def forward(self) -> None:
        """All layers, each over the whole range."""
        head = self.costs.head
        self._do(Start(*self._everything(self.before is None)))
        for layer in range(head + 1):
            if self.before is not None and self._carries(layer):
                self._do(Receive(carry(layer, self.chunks[0] - 1), self.before, stream=1))
        for layer in range(head + 1):
            for chunk in self.chunks:
                self._do(Loss(chunk, False) if layer == head else Forward(layer, chunk, False))
            self._drop_sent()
            if self.after is not None and self._carries(layer):
                self._send(carry(layer, self.chunks[-1]), self.after)
        self._do(Turn(*self._everything(self.after is None)))
        self._drop_sent()
        for layer in range(head, -1, -1):
            if self.after is not None and has_adjoint(self.costs.tile(layer, self.chunks[-1])):
                self._do(Receive(adjoint(layer, self.chunks[-1]), self.after, stream=1))

    def backward(self, layer: int) -> None:
        """Make the residual chunks that the VJPs of a layer read, and run those."""
        for chunks, pieces in self.groups:
            for piece in pieces[layer]:
                for advanced in range(piece.first, piece.end):  # layer by layer, as sharded parameters are gathered
                    for chunk in chunks:
                        self._do(Recompute(advanced, chunk, False))
        if layer < self.problem.bottom:
            return
        for chunk in reversed(self.chunks):
            self._do(Recompute(layer, chunk, True))
            self._do(vjp(self.costs, layer, chunk))
        self._drop_sent()
        if self.before is not None and has_adjoint(self.costs.tile(layer, self.chunks[0])):
            self._send(adjoint(layer, self.chunks[0] - 1), self.before)

    def finish(self) -> None:
        """Add the gradients up, and hand them on."""
        layers = range(self.costs.head, self.problem.bottom - 1, -1)
        self._drop_sent()
        for layer in layers if self.holders > 1 else ():
            self._do(Sum(layer, self.problem.residency.gradients(layer, range(self.costs.head + 1))))
        for layer in layers:
            self._do(Publish(layer))

    def _everything(self, wanted: bool) -> tuple[int, int]:
        """First and last of all layers, or of none."""
        return (0, self.costs.head) if wanted else (1, 0)

    def _carries(self, layer: int) -> bool:
        return has_carry(self.costs.tile(layer, 0))

    def _send(self, value: Value, to: int) -> None:
        self._do(Send(value, to, stream=1))
        self.sent.append(value)

    def _drop_sent(self) -> None:
        """Drop what was sent a layer ago."""
        if self.sent:
            self.waits[len(self.actions)] = self.sent
            self._do(Free())
            self.sent = []

    def _do(self, action: Action) -> None:
        self.actions.append(on_device(action, self.device))


def _by_layer(pieces: Sequence[Piece], head: int) -> dict[int, list[Piece]]:
    """The advances that come before the VJPs of each layer."""
    found: dict[int, list[Piece]] = {layer: [] for layer in range(head + 1)}
    waiting: list[Piece] = []
    for piece in pieces:
        if piece.first == piece.end:
            found[piece.first], waiting = waiting, []
        else:
            waiting.append(piece)
    return found
