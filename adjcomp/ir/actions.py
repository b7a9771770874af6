"""The closed set of actions that a plan is made of. The planner writes them, the verifier replays them, the runtime runs them.

Layers: 0 is the stem, 1 … K the residual layers, K + 1 the head. Values: see `adjcomp.ir.values`. What an action reads and writes
follows from its rule and the tile's flags. The values in `frees` are dropped when the action ends, except that `Adjoint` and
`HeadVjp` own `keep[k,c]` and `g[k,c]` (unless layers share it) and drop each as soon as it is consumed. A new idea is a new
action, not a flag on an old one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import Value, adjoint, carry, cotangent, has_adjoint, has_carry, keep, stream


@dataclass(frozen=True, slots=True)
class Action(ABC):
    """One step of a plan on one device and stream."""

    device: int = field(default=0, kw_only=True)  # index into the plan's shares
    stream: int = field(default=0, kw_only=True)  # 0 is the compute stream
    frees: tuple[Value, ...] = field(default=(), kw_only=True)  # dropped when the action ends

    @abstractmethod
    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        """Values that must be live when the action starts."""

    @abstractmethod
    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        """Values that the action makes; none of them may be live when it starts."""

    @abstractmethod
    def seconds(self, costs: StackCosts) -> float:
        """Predicted seconds."""


@cache
def own_fields(kind: type[Action]) -> tuple[str, ...]:
    """Names of the fields that this kind of action has besides those of every action: layer, chunk, …"""
    names: tuple[str, ...] = kind.__match_args__
    return names


@dataclass(frozen=True, slots=True)
class Mark(Action):
    """An action that touches no value but those it drops, and takes no time of its own."""

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Start(Action):
    """Read as: make the initial state s[k,-1] of every layer from `first` to `last` that carries one; none where first > last."""

    first: int
    last: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return tuple(carry(k, -1) for k in range(self.first, self.last + 1) if has_carry(costs.tile(k, 0)))

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Forward(Action):
    """Read as: run tile (layer, chunk), leave x and s, and with `keep` the internals its VJP needs."""

    layer: int  # 0 … K
    chunk: int
    keep: bool

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return _tile_reads(costs, self.layer, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        made: tuple[Value, ...] = (stream(self.layer, self.chunk),)
        if has_carry(costs.tile(self.layer, self.chunk)):
            made += (carry(self.layer, self.chunk),)
        return (*made, keep(self.layer, self.chunk)) if self.keep else made

    def seconds(self, costs: StackCosts) -> float:
        tile = costs.tile(self.layer, self.chunk)
        return tile.keep_seconds if self.keep else tile.forward_seconds


@dataclass(frozen=True, slots=True)
class Loss(Action):
    """Read as: run the head on chunk: add its share to the loss, fill its slice of the outputs, with `keep` leave internals."""

    chunk: int
    keep: bool

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return _tile_reads(costs, costs.head, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        made: tuple[Value, ...] = ()
        if has_carry(costs.tile(costs.head, self.chunk)):
            made += (carry(costs.head, self.chunk),)
        return (*made, keep(costs.head, self.chunk)) if self.keep else made

    def seconds(self, costs: StackCosts) -> float:
        tile = costs.tile(costs.head, self.chunk)
        return tile.keep_seconds if self.keep else tile.forward_seconds


@dataclass(frozen=True, slots=True)
class Turn(Action):
    """Read as: the forward is over; make the gradient accumulators, and lam[k,C-1] of each layer from `first` to `last`."""

    first: int
    last: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return ()

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        end = costs.chunk_count - 1
        return tuple(adjoint(k, end) for k in range(self.first, self.last + 1) if has_adjoint(costs.tile(k, end)))

    def seconds(self, costs: StackCosts) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Recompute(Action):
    """Read as: run tile (layer, chunk) again for x[layer,chunk] and, with `keep`, the internals; never for s."""

    layer: int  # 0 … K + 1
    chunk: int
    keep: bool

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return _tile_reads(costs, self.layer, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        made: tuple[Value, ...] = () if self.layer == costs.head else (stream(self.layer, self.chunk),)
        return (*made, keep(self.layer, self.chunk)) if self.keep else made

    def seconds(self, costs: StackCosts) -> float:
        tile = costs.tile(self.layer, self.chunk)
        return tile.keep_seconds if self.keep else tile.forward_seconds


@dataclass(frozen=True, slots=True)
class Advance(Action):
    """Read as: the border after this chunk was dropped; run tile (layer, chunk) again for s and x, for no loss and no output."""

    layer: int  # 0 … K + 1
    chunk: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return _tile_reads(costs, self.layer, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        made: tuple[Value, ...] = () if self.layer == costs.head else (stream(self.layer, self.chunk),)
        return (*made, carry(self.layer, self.chunk)) if has_carry(costs.tile(self.layer, self.chunk)) else made

    def seconds(self, costs: StackCosts) -> float:
        return costs.tile(self.layer, self.chunk).forward_seconds


@dataclass(frozen=True, slots=True)
class HeadVjp(Action):
    """Read as: from the internals of the head and the cotangent of the loss make g[K,chunk]; add to the head's gradients."""

    chunk: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return vjp_reads(costs, costs.head, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return _vjp_writes(costs, costs.head, self.chunk)

    def seconds(self, costs: StackCosts) -> float:
        return costs.tile(costs.head, self.chunk).adjoint_seconds


@dataclass(frozen=True, slots=True)
class Adjoint(Action):
    """Read as: from keep, g and lam of the tile make g[layer-1,chunk] and lam[layer,chunk-1]; add to the gradients."""

    layer: int  # 0 … K
    chunk: int

    def reads(self, costs: StackCosts) -> tuple[Value, ...]:
        return vjp_reads(costs, self.layer, self.chunk)

    def writes(self, costs: StackCosts) -> tuple[Value, ...]:
        return _vjp_writes(costs, self.layer, self.chunk)

    def seconds(self, costs: StackCosts) -> float:
        return costs.tile(self.layer, self.chunk).adjoint_seconds


@dataclass(frozen=True, slots=True)
class Free(Mark):
    """Read as: drop values that nothing else drops: what another device has received by now."""


@dataclass(frozen=True, slots=True)
class Publish(Mark):
    """Read as: the gradients of layer are complete; hand them to autograd."""

    layer: int  # 0 … K + 1


def _tile_reads(costs: StackCosts, layer: int, chunk: int) -> tuple[Value, ...]:
    """What running tile (layer, chunk) forward reads: x[layer-1,chunk] (tokens for the stem) and s[layer,chunk-1]."""
    needed: tuple[Value, ...] = (stream(layer - 1, chunk),) if layer > 0 else ()
    return (*needed, carry(layer, chunk - 1)) if has_carry(costs.tile(layer, chunk)) else needed


def vjp_reads(costs: StackCosts, layer: int, chunk: int) -> tuple[Value, ...]:
    """What the VJP of tile (layer, chunk) reads; the flags of its tile say which of the tile's inputs and outputs it looks at."""
    tile = costs.tile(layer, chunk)
    needed = [keep(layer, chunk)]
    if layer < costs.head:
        needed.append(cotangent(costs.cotangent_of(layer), chunk))
    if has_adjoint(tile):
        needed.append(adjoint(layer, chunk))
    if tile.reads_input and layer > 0:
        needed.append(stream(layer - 1, chunk))
    if tile.reads_output and layer < costs.head:
        needed.append(stream(layer, chunk))
    if tile.reads_carry and has_carry(tile):
        needed.append(carry(layer, chunk - 1))
    return tuple(needed)


def _vjp_writes(costs: StackCosts, layer: int, chunk: int) -> tuple[Value, ...]:
    """What the VJP of tile (layer, chunk) makes."""
    tile = costs.tile(layer, chunk)
    made: tuple[Value, ...] = (cotangent(layer - 1, chunk),) if costs.makes_cotangent(layer, chunk) else ()
    return (*made, adjoint(layer, chunk - 1)) if has_adjoint(tile) else made
