"""The rules of the actions for the verifier: what each reads, writes, consumes and takes, written down from its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Adjoint, HeadVjp, Recompute
from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.values import Kind


class BrokenRule(Exception):
    """An action can't run; the text says why."""


@dataclass(frozen=True)
class Rule:
    """What one kind of action does on one layer, with chunks relative to its own."""

    reads: tuple[tuple[Kind, int, int], ...]  # kind, layer, chunk relative to the action's
    writes: tuple[tuple[Kind, int, int, int], ...]  # kind, layer, relative chunk, bytes
    owns: tuple[tuple[Kind, int, int], ...]  # values that the action consumes: it has to free them
    workspace: int  # bytes
    seconds: float


def value_size(costs: StackCosts, kind: Kind, layer: int, chunk: int) -> int:
    """Bytes of a value; those before the first chunk are as large as those after it."""
    tile = costs.tile(layer, max(chunk, 0))
    sizes = {
        Kind.STREAM: tile.stream_bytes,
        Kind.CARRY: tile.carry_bytes,
        Kind.NARROW: tile.narrow_bytes,
        Kind.KEEP: tile.keep_bytes,
        Kind.COTANGENT: tile.cotangent_bytes,
        Kind.ADJOINT: tile.adjoint_bytes,
    }
    if kind not in sizes:
        join = costs.joins[layer]
        sizes[Kind.HALO], sizes[Kind.HALO_ADJOINT] = join.halo_bytes, join.halo_adjoint_bytes
        sizes[Kind.SUMMARY], sizes[Kind.ADJOINT_SUMMARY] = join.summary_bytes, join.adjoint_summary_bytes
    return sizes[kind]


def narrow_rule(costs: StackCosts, layer: int, chunk: int, *, wider: bool) -> Rule:
    """A state rounded to lower precision or, `wider`, made from that again."""
    tile = costs.tile(layer, max(chunk, 0))
    if not tile.narrow_bytes:
        raise BrokenRule(f"the state of layer {layer} has no narrower form")
    state, rounded = (Kind.CARRY, layer, 0), (Kind.NARROW, layer, 0)
    if wider:
        return Rule((rounded,), ((*state, tile.carry_bytes),), (), tile.carry_bytes, 0.0)
    return Rule((state,), ((*rounded, tile.narrow_bytes),), (), tile.narrow_bytes, 0.0)


def initial_rule(costs: StackCosts, kind: Kind, first: int, last: int, chunk: int) -> Rule:
    """The states before chunk 0 or the adjoint states after the last chunk, of layers `first` … `last` at once."""
    writes = []
    for layer in range(first, last + 1):
        tile = costs.tile(layer, max(chunk, 0))
        if tile.carry_bytes > 0 and (kind is Kind.CARRY or tile.has_vjp):
            writes.append((kind, layer, chunk, tile.carry_bytes if kind is Kind.CARRY else tile.adjoint_bytes))
    return Rule((), tuple(writes), (), sum(size for *_, size in writes), 0.0)


def tile_rule(costs: StackCosts, action: type[Action], layer: int, chunk: int, keep: bool) -> Rule:
    """The rule of `action` on a tile."""
    tile = costs.tile(layer, chunk)
    if action in (Adjoint, HeadVjp):
        previous = costs.tile(layer, max(chunk - 1, 0))
        below = costs.tile(layer - 1, chunk) if layer > 0 else None
        owns = [(Kind.KEEP, layer, 0)]
        if layer < costs.head and not costs.shares_cotangent:
            owns.append((Kind.COTANGENT, layer, 0))
        hands_on = costs.shares_cotangent and layer < costs.head
        writes = tuple(_vjp_writes(tile, None if hands_on else below, previous, layer))
        reads = list(_vjp_reads(costs, tile, layer))
        return Rule(tuple(reads), writes, tuple(owns), tile.adjoint_workspace_bytes, tile.adjoint_seconds)
    reads = [(Kind.STREAM, layer - 1, 0)] if layer > 0 else []
    made = [(Kind.STREAM, layer, 0, tile.stream_bytes)] if layer < costs.head else []
    if tile.carry_bytes > 0:
        reads.append((Kind.CARRY, layer, -1))
        if action is not Recompute:
            made.append((Kind.CARRY, layer, 0, tile.carry_bytes))
    if keep:
        made.append((Kind.KEEP, layer, 0, tile.keep_bytes))
    workspace = tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
    return Rule(tuple(reads), tuple(made), (), workspace, tile.keep_seconds if keep else tile.forward_seconds)


def _vjp_reads(costs: StackCosts, tile: TileCost, layer: int) -> Iterator[tuple[Kind, int, int]]:
    """Everything the VJP of a tile looks at."""
    yield Kind.KEEP, layer, 0
    if layer < costs.head:
        yield Kind.COTANGENT, costs.head - 1 if costs.shares_cotangent else layer, 0
        if tile.reads_output:
            yield Kind.STREAM, layer, 0
    if tile.reads_input and layer > 0:
        yield Kind.STREAM, layer - 1, 0
    if tile.carry_bytes > 0:
        yield Kind.ADJOINT, layer, 0
        if tile.reads_carry:
            yield Kind.CARRY, layer, -1


def _vjp_writes(tile: TileCost, below: TileCost | None, previous: TileCost, layer: int) -> Iterator[tuple[Kind, int, int, int]]:
    """The cotangents of a tile's inputs."""
    if below is not None and tile.passes_cotangent:
        yield Kind.COTANGENT, layer - 1, 0, below.cotangent_bytes
    if tile.carry_bytes > 0:
        yield Kind.ADJOINT, layer, -1, previous.adjoint_bytes
