"""The verifier's view of borders between joined ranges: what summaries cover, and which halos have yet to pass something back.

Written down from the meaning of the actions, apart from `adjcomp.ir.summaries`.
"""

from __future__ import annotations

from collections.abc import Iterable

from adjcomp.ir.actions import Adjoint, HeadVjp
from adjcomp.ir.costs import JoinCost, StackCosts
from adjcomp.ir.rules import BrokenRule, Rule, tile_rule, value_size
from adjcomp.ir.summaries import (
    AdjointSettle,
    AdjointSummarize,
    Adopt,
    Detach,
    RangeAction,
    Settle,
    SplitHalo,
    Summarize,
    Tail,
    TailVjp,
)
from adjcomp.ir.values import Kind, Value, adjoint

BEFORE_TURN = (Tail, Summarize, Settle, Adopt)


class Borders:
    """What actions on ranges have done so far. Every method raises BrokenRule where one of them makes no sense."""

    def __init__(self, costs: StackCosts) -> None:
        self.costs = costs
        self.covers: dict[tuple[int, Value], tuple[int, int]] = {}  # (device, summary): its first and last chunk
        self.whole: set[tuple[int, Value]] = set()  # (device, lam) that a VJP has made, so that it has its halos' part
        self.owed: set[tuple[int, int]] = set()  # (layer, chunk): halos after chunk whose cotangent isn't in any gradient yet

    def rule(self, action: RangeAction) -> Rule:
        """The rule of an action, after checking that it may come now; chunks are relative to the action's."""
        costs, layer, chunk = self.costs, action.layer, action.chunk
        if not costs.joins:
            raise BrokenRule("the ranges of this plan have nothing that joins them")
        lowest = -1 if isinstance(action, AdjointSettle | Detach | SplitHalo) else 0
        if not (0 <= layer <= costs.head and lowest <= chunk < costs.chunk_count - 1):
            raise BrokenRule(f"there is no border of layer {layer} after chunk {chunk}")
        join = costs.joins[layer]
        if costs.tile(layer, 0).carry_bytes == 0:
            raise BrokenRule(f"layer {layer} hands no state on")
        match action:
            case Tail():
                return self._tail(join, layer)
            case Summarize(first=first):
                return self._summarize(action.device, join, layer, chunk, first)
            case Settle(first=first):
                return self._settle(action.device, join, layer, chunk, first)
            case Adopt():
                return self._adopt(join, layer)
            case AdjointSummarize(last=last):
                return self._adjoint_summarize(action.device, join, layer, chunk, last)
            case AdjointSettle(last=last):
                return self._adjoint_settle(action.device, join, layer, chunk, last)
            case Detach():
                return self._detach(action.device, join, layer, chunk)
            case SplitHalo():
                return self._split(action.device, join, layer, chunk)
            case TailVjp():
                return self._tail_vjp(join, layer, chunk)
        raise BrokenRule(f"no rule for {type(action).__name__}")

    def made(self, device: int, layer: int, chunk: int) -> None:
        """A VJP has made lam[layer,chunk-1] on a device, with all that belongs to it."""
        self.whole.add((device, adjoint(layer, chunk - 1)))

    def received(self, device: int, value: Value) -> None:
        """A value comes from another device."""
        self.whole.discard((device, value))
        self.covers.pop((device, value), None)

    def check_cotangent(self, layer: int, chunk: int) -> None:
        """Something is about to read g[layer,chunk] as a whole."""
        if (layer + 1, chunk) in self.owed:
            raise BrokenRule(f"g[{layer},{chunk}] lacks what the halos of layer {layer + 1} pass back")

    def check_complete(self, layers: Iterable[int]) -> None:
        """The gradients of some layers are about to be added up or handed out."""
        for layer, chunk in sorted(self.owed):
            if layer in layers:
                raise BrokenRule(f"the gradients of layer {layer} lack what its halos after chunk {chunk} pass back")

    def _tail(self, join: JoinCost, layer: int) -> Rule:
        if not join.halo_bytes or join.steps > self.costs.chunk:
            raise BrokenRule(f"layer {layer} has no halos that one chunk makes")
        return Rule(_input(layer), ((Kind.HALO, layer, 0, join.halo_bytes),), (), join.tail_workspace_bytes, join.tail_seconds)

    def _summarize(self, device: int, join: JoinCost, layer: int, chunk: int, first: int) -> Rule:
        _check_linear(join.summary_bytes, layer)
        reads = _input(layer)
        if chunk > first:
            self._check_covers(device, Value(Kind.SUMMARY, layer, chunk - 1), (first, chunk - 1))
            reads += ((Kind.SUMMARY, layer, -1),)
        elif join.halo_bytes:
            reads += ((Kind.HALO, layer, -1),)
        self.covers[device, Value(Kind.SUMMARY, layer, chunk)] = (first, chunk)
        made = (Kind.SUMMARY, layer, 0, join.summary_bytes)
        return Rule(reads, (made,), (), join.summarize_workspace_bytes, join.summarize_seconds)

    def _settle(self, device: int, join: JoinCost, layer: int, chunk: int, first: int) -> Rule:
        _check_linear(join.summary_bytes, layer)
        self._check_covers(device, Value(Kind.SUMMARY, layer, chunk), (first, chunk))
        reads: tuple[tuple[Kind, int, int], ...] = ((Kind.SUMMARY, layer, 0), (Kind.CARRY, layer, first - 1 - chunk))
        reads += ((Kind.HALO, layer, 0),) if join.halo_bytes else ()
        size = self.costs.layers[layer].carry_bytes
        return Rule(reads, ((Kind.CARRY, layer, 0, size),), (), size, join.settle_seconds)

    def _adopt(self, join: JoinCost, layer: int) -> Rule:
        if join.summary_bytes:
            raise BrokenRule(f"the state of layer {layer} is more than its halos")
        size = self.costs.layers[layer].carry_bytes
        return Rule(((Kind.HALO, layer, 0),), ((Kind.CARRY, layer, 0, size),), (), size, 0.0)

    def _adjoint_summarize(self, device: int, join: JoinCost, layer: int, chunk: int, last: int) -> Rule:
        _check_linear(join.adjoint_summary_bytes, layer)
        self.check_cotangent(layer, chunk)
        vjp = HeadVjp if layer == self.costs.head else Adjoint
        reads = tuple(read for read in tile_rule(self.costs, vjp, layer, chunk, True).reads if read[0] is not Kind.ADJOINT)
        if chunk < last:
            self._check_covers(device, Value(Kind.ADJOINT_SUMMARY, layer, chunk), (chunk + 1, last))
            reads += ((Kind.ADJOINT_SUMMARY, layer, 0),)
        self.covers[device, Value(Kind.ADJOINT_SUMMARY, layer, chunk - 1)] = (chunk, last)
        made = (Kind.ADJOINT_SUMMARY, layer, -1, join.adjoint_summary_bytes)
        return Rule(reads, (made,), (), join.adjoint_summarize_workspace_bytes, join.adjoint_summarize_seconds)

    def _adjoint_settle(self, device: int, join: JoinCost, layer: int, chunk: int, last: int) -> Rule:
        _check_linear(join.adjoint_summary_bytes, layer)
        self._check_covers(device, Value(Kind.ADJOINT_SUMMARY, layer, chunk), (chunk + 1, last))
        self._owe(device, join, layer, chunk)
        reads = ((Kind.ADJOINT_SUMMARY, layer, 0), (Kind.ADJOINT, layer, last - chunk))
        size = value_size(self.costs, Kind.ADJOINT, layer, chunk)
        return Rule(reads, ((Kind.ADJOINT, layer, 0, size),), (), size, join.adjoint_settle_seconds)

    def _detach(self, device: int, join: JoinCost, layer: int, chunk: int) -> Rule:
        if join.adjoint_summary_bytes:
            raise BrokenRule(f"the adjoint state of layer {layer} is more than what its halos pass back")
        self._owe(device, join, layer, chunk)
        size = value_size(self.costs, Kind.ADJOINT, layer, chunk)
        return Rule((), ((Kind.ADJOINT, layer, 0, size),), (), size, 0.0)

    def _owe(self, device: int, join: JoinCost, layer: int, chunk: int) -> None:
        """lam[layer,chunk] is made without what its halos pass back."""
        self.whole.discard((device, adjoint(layer, chunk)))
        if join.halo_adjoint_bytes:
            if (layer, chunk) in self.owed:
                raise BrokenRule(f"lam[{layer},{chunk}] is made twice without its halos' part")
            self.owed.add((layer, chunk))

    def _split(self, device: int, join: JoinCost, layer: int, chunk: int) -> Rule:
        if not join.halo_adjoint_bytes:
            raise BrokenRule(f"layer {layer} has no halos that pass anything back")
        if (device, adjoint(layer, chunk)) not in self.whole:
            raise BrokenRule(f"lam[{layer},{chunk}] doesn't come from a VJP on this device: it lacks its halos' part")
        size = join.halo_adjoint_bytes
        return Rule(((Kind.ADJOINT, layer, 0),), ((Kind.HALO_ADJOINT, layer, 0, size),), (), size, 0.0)

    def _tail_vjp(self, join: JoinCost, layer: int, chunk: int) -> Rule:
        if (layer, chunk) not in self.owed:
            raise BrokenRule(f"the gradients have what the halos of layer {layer} after chunk {chunk} pass back")
        self.owed.discard((layer, chunk))
        reads: tuple[tuple[Kind, int, int], ...] = ((Kind.HALO_ADJOINT, layer, 0), *_input(layer))
        if self.costs.makes_cotangent(layer, chunk):
            self.check_cotangent(layer - 1, chunk)
            reads += ((Kind.COTANGENT, layer - 1, 0),)
        return Rule(reads, (), (), join.tail_vjp_workspace_bytes, join.tail_vjp_seconds)

    def _check_covers(self, device: int, value: Value, wanted: tuple[int, int]) -> None:
        found = self.covers.get((device, value))
        if found != wanted:
            raise BrokenRule(f"{value} here is no summary of chunks {wanted[0]} to {wanted[1]}")


def _check_linear(size: int, layer: int) -> None:
    if not size:
        raise BrokenRule(f"layer {layer} has no state that a summary speaks of")


def _input(layer: int) -> tuple[tuple[Kind, int, int], ...]:
    """The residual chunk that a tile reads."""
    return ((Kind.STREAM, layer - 1, 0),) if layer > 0 else ()
