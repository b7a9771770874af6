"""The actions of one device that has all layers and a range of chunks, as they are written."""

from __future__ import annotations

from collections.abc import Sequence

from adjcomp.ir.actions import Action, Free, Publish, Recompute, Start
from adjcomp.ir.transfers import Receive, Send, Sum
from adjcomp.ir.values import Value, has_adjoint, has_carry
from adjcomp.passes.lifetimes import drop_after_last_use, on_device
from adjcomp.passes.place.nesting import Piece
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.ranges import Ranges


class RangeList:
    """Writes what all placements by time have in common.

    before, after: the devices with the ranges beside this one, None at the ends of the sequence. place: which one this is, of
    `holders` ranges.
    """

    def __init__(self, problem: Problem, plan: Ranges, device: int) -> None:
        self.problem, self.costs, self.device = problem, problem.costs, device
        self.chunks = range(plan.cuts[device], plan.cuts[device + 1])
        busy = [d for d in range(len(plan.cuts) - 1) if plan.cuts[d] < plan.cuts[d + 1]]
        self.place, self.holders = busy.index(device), len(busy)
        self.before = busy[self.place - 1] if self.place else None
        self.after = busy[self.place + 1] if self.place + 1 < len(busy) else None
        self.groups: list[tuple[range, dict[int, list[Piece]]]] = []  # chunks, and what comes before the VJPs of each layer
        self.held: dict[int, int] = {}  # by chunk: layers right below the head that hold their internals
        start = self.chunks.start
        for depth, size in plan.depths[device]:
            self.groups.append((range(start, start + size), _by_layer(plan.pieces[depth], problem.head)))
            self.held.update(dict.fromkeys(range(start, start + size), plan.held.get(depth, 0)))
            start += size
        self.actions: list[Action] = []
        self.waits: dict[int, list[Value]] = {}
        self.sent: list[Value] = []

    def start(self) -> None:
        """Initial states, where the sequence starts."""
        self.do(Start(*self.everything(self.before is None)))

    def advance(self, layer: int) -> None:
        """Make the residual chunks that the VJPs of a layer read."""
        for chunks, pieces in self.groups:
            for piece in pieces[layer]:
                for advanced in range(piece.first, piece.end):  # layer by layer, as sharded parameters are gathered
                    for chunk in chunks:
                        self.do(Recompute(advanced, chunk, False))

    def add_up(self, layer: int) -> None:
        """Begin to add a layer's gradients up, to which nothing more comes here."""
        if self.holders > 1 and layer >= self.problem.bottom:
            self.do(Sum(layer, self.problem.residency.gradients(layer, range(self.costs.head + 1))))

    def finish(self) -> tuple[Action, ...]:
        """Hand the gradients on, and drop everything in time."""
        layers = range(self.costs.head, self.problem.bottom - 1, -1)
        self.drop_sent()
        for layer in layers:
            self.do(Publish(layer))
        return drop_after_last_use(self.costs, self.actions, self.waits, recipes=self.problem.recipes)

    def everything(self, wanted: bool) -> tuple[int, int]:
        """First and last of all layers, or of none."""
        return (0, self.costs.head) if wanted else (1, 0)

    def holds(self, layer: int, chunk: int) -> bool:
        """Whether a forward keeps its internals for the backward."""
        return self.costs.head - self.held[chunk] <= layer < self.costs.head

    def carries(self, layer: int) -> bool:
        """Whether a layer hands a state on."""
        return has_carry(self.costs.tile(layer, 0))

    def takes_adjoint(self, layer: int) -> bool:
        """Whether an adjoint state comes back to a layer."""
        return has_adjoint(self.costs.tile(layer, 0))

    def receive(self, value: Value, source: int) -> None:
        """Make room for a value from another device."""
        self.do(Receive(value, source, stream=1))

    def send(self, value: Value, to: int) -> None:
        """Hand a value to another device; `drop_sent` drops it here."""
        self.do(Send(value, to, stream=1))
        self.sent.append(value)

    def drop_sent(self) -> None:
        """Drop what was sent and not dropped yet."""
        if self.sent:
            self.waits[len(self.actions)] = self.sent
            self.do(Free())
            self.sent = []

    def do(self, action: Action) -> None:
        """The next action."""
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
