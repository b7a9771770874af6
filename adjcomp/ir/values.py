"""The values that plans move: one residual chunk, border, set of internals, cotangent or adjoint state per (layer, chunk)."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from adjcomp.ir.costs import JoinCost, StackCosts, TileCost


class Kind(StrEnum):
    """What a value is."""

    STREAM = "x"  # x[k,c], the residual chunk c after layer k
    CARRY = "s"  # s[k,c], the state layer k hands from chunk c to chunk c + 1: the border; c = -1 is the initial state
    KEEP = "keep"  # keep[k,c], the internals that the VJP of tile (k,c) needs
    COTANGENT = "g"  # g[k,c], the cotangent of x[k,c]
    NARROW = "n"  # n[k,c], the state s[k,c] rounded to lower precision: a border that takes less
    ADJOINT = "lam"  # lam[k,c], the adjoint state: the cotangent of s[k,c]
    HALO = "halo"  # halo[k,c], the part of s[k,c] that the last steps of chunk c make, whatever comes in
    SUMMARY = "sum"  # sum[k,c], what a range up to chunk c does to any state: the one it leaves from nothing, and its products
    ADJOINT_SUMMARY = "asum"  # asum[k,c], what a range from chunk c + 1 on does to any adjoint state, likewise
    HALO_ADJOINT = "ghalo"  # ghalo[k,c], the cotangent of halo[k,c]: the part of lam[k,c] that belongs to halos


class Value(NamedTuple):
    """One value of the abstract machine, printed as `x[3,7]`."""

    kind: Kind
    layer: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.layer},{self.chunk}]"


def parse_value(text: str) -> Value:
    """The value that prints as `text`; ValueError for anything else."""
    kind, bracket, rest = text.partition("[")
    layer, comma, chunk = rest.removesuffix("]").partition(",")
    if not (bracket and comma and rest.endswith("]")):
        raise ValueError(f"{text!r} is no value: values read like x[3,7], s[3,-1], keep[3,7], g[3,7] or lam[3,7]")
    return Value(Kind(kind), int(layer), int(chunk))


def stream(layer: int, chunk: int) -> Value:
    """x[layer,chunk]."""
    return Value(Kind.STREAM, layer, chunk)


def carry(layer: int, chunk: int) -> Value:
    """s[layer,chunk]."""
    return Value(Kind.CARRY, layer, chunk)


def narrow(layer: int, chunk: int) -> Value:
    """n[layer,chunk]."""
    return Value(Kind.NARROW, layer, chunk)


def keep(layer: int, chunk: int) -> Value:
    """keep[layer,chunk]."""
    return Value(Kind.KEEP, layer, chunk)


def cotangent(layer: int, chunk: int) -> Value:
    """g[layer,chunk]."""
    return Value(Kind.COTANGENT, layer, chunk)


def adjoint(layer: int, chunk: int) -> Value:
    """lam[layer,chunk]."""
    return Value(Kind.ADJOINT, layer, chunk)


def halo(layer: int, chunk: int) -> Value:
    """halo[layer,chunk]."""
    return Value(Kind.HALO, layer, chunk)


def summary(layer: int, chunk: int) -> Value:
    """sum[layer,chunk]."""
    return Value(Kind.SUMMARY, layer, chunk)


def adjoint_summary(layer: int, chunk: int) -> Value:
    """asum[layer,chunk]."""
    return Value(Kind.ADJOINT_SUMMARY, layer, chunk)


def halo_adjoint(layer: int, chunk: int) -> Value:
    """ghalo[layer,chunk]."""
    return Value(Kind.HALO_ADJOINT, layer, chunk)


def value_bytes(costs: StackCosts, value: Value) -> int:
    """Bytes of `value`; the initial state s[k,-1] and its adjoint are as large as those of chunk 0."""
    tile = costs.tile(value.layer, max(value.chunk, 0))
    match value.kind:
        case Kind.STREAM:
            return tile.stream_bytes
        case Kind.CARRY:
            return tile.carry_bytes
        case Kind.NARROW:
            return tile.narrow_bytes
        case Kind.KEEP:
            return tile.keep_bytes
        case Kind.COTANGENT:
            return tile.cotangent_bytes
        case Kind.ADJOINT:
            return tile.adjoint_bytes
        case Kind.HALO | Kind.SUMMARY | Kind.ADJOINT_SUMMARY | Kind.HALO_ADJOINT:
            return _join_bytes(costs.joins[value.layer], value.kind)


def _join_bytes(join: JoinCost, kind: Kind) -> int:
    """Bytes of a value that joins ranges."""
    match kind:
        case Kind.HALO:
            return join.halo_bytes
        case Kind.SUMMARY:
            return join.summary_bytes
        case Kind.ADJOINT_SUMMARY:
            return join.adjoint_summary_bytes
    return join.halo_adjoint_bytes


def has_carry(tile: TileCost) -> bool:
    """Whether the layer hands a state to the next chunk at all; without one there are neither s[k,c] nor lam[k,c]."""
    return tile.carry_bytes > 0


def has_adjoint(tile: TileCost) -> bool:
    """Whether lam[k,c] exists: the layer hands a state on and takes part in the backward pass."""
    return tile.has_vjp and tile.carry_bytes > 0
