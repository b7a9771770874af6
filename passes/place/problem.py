"""A placement problem at one chunk length: sums over layers, and what each device can hold and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import bottom_layer
from adjcomp.ir.plan import Wiring
from adjcomp.ir.residency import Residency
from adjcomp.ir.values import has_adjoint
from adjcomp.passes.recipes import Recipes

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Site:
    """One device of the machine."""

    name: str
    budget_bytes: int
    memory_bytes: int  # what the device has
    speed: float  # how many times as fast as the cost tables say


@dataclass(frozen=True)
class Problem:
    """Costs at one chunk length, on a machine.

    A problem of one lane of a grid has the lane's chunks only, and a site for each stage.

    owned: first and last layer that each device (or stage of a grid) has already, None for one without any; None where
        layers are free to go anywhere.
    """

    costs: StackCosts
    residency: Residency
    sites: tuple[Site, ...]
    wiring: Wiring
    lanes: int = 1  # devices that share a stage's chunks
    chain: tuple[float, float] = (
        0.0,
        0.0,
    )  # seconds of the forwards, and of the adjoints, that follow each other through all lanes
    owned: tuple[tuple[int, int] | None, ...] | None = None

    def allows(self, device: int, first: int, last: int) -> bool:
        """Whether a stage that starts with layer `first` may reach to `last` on a device."""
        if self.owned is None:
            return True
        own = self.owned[device]
        return own is not None and own[0] == first and last <= own[1]

    def fixed_bytes(self, first: int, last: int) -> int:
        """Bytes that live with layers `first` … `last` all the time, or from the turn on."""
        if (first, last) not in self._fixed:
            resident, turn = self.residency.on(first, last)
            self._fixed[first, last] = sum(resident.values()) + sum(turn.values())
        return self._fixed[first, last]

    @cached_property
    def _fixed(self) -> dict[tuple[int, int], int]:
        """What `fixed_bytes` has found."""
        return {}

    @property
    def head(self) -> int:
        """Index of the head."""
        return self.costs.head

    @cached_property
    def bottom(self) -> int:
        """The lowest layer with a VJP."""
        return bottom_layer(self.costs)

    @cached_property
    def recipes(self) -> Recipes:
        """What the actions of plans do, the same for all devices."""
        return Recipes(self.costs)

    @cached_property
    def sums(self) -> LayerSums:
        """Sums over layers."""
        return LayerSums(self.costs)


class LayerSums:
    """Prefix sums over layers, so that a range of layers costs a subtraction. Seconds at speed 1, bytes of an inner chunk."""

    def __init__(self, costs: StackCosts) -> None:
        tiles, last, count = costs.layers, costs.last_layers, costs.chunk_count
        pairs = list(zip(tiles, last, strict=True))
        self.forward_all = _prefix([(count - 1) * t.forward_seconds + e.forward_seconds for t, e in pairs])
        self.adjoint_all = _prefix([(count - 1) * _adjoint(t) + _adjoint(e) for t, e in pairs])
        self.last_chunk = _prefix([e.forward_seconds + _adjoint(e) for e in last])
        self.first_chunk = self.last_chunk if count == 1 else _prefix([t.forward_seconds + _adjoint(t) for t in tiles])
        self.forward = _prefix([t.forward_seconds for t in tiles])
        self.keep = _prefix([t.keep_seconds if t.has_vjp else t.forward_seconds for t in tiles])
        self.border_bytes = _prefix([t.carry_bytes for t in tiles])
        self.read_border_bytes = _prefix([t.carry_bytes if t.has_vjp and t.reads_carry else 0 for t in tiles])
        self.adjoint_bytes = _prefix([t.adjoint_bytes if has_adjoint(t) else 0 for t in tiles])
        self.internals = _prefix([internals(costs, k) for k in range(len(tiles))])


def _adjoint(tile: TileCost) -> float:
    return tile.adjoint_seconds if tile.has_vjp else 0.0


def internals(costs: StackCosts, layer: int) -> int:
    """Bytes that stay with a tile of an inner chunk when its internals are kept: keep, and what the VJP reads besides."""
    tile = costs.layers[layer]
    if not tile.has_vjp:
        return 0
    below = costs.layers[layer - 1].stream_bytes if layer > 0 and tile.reads_input else 0
    own = tile.stream_bytes if tile.reads_output and layer < costs.head else 0
    return tile.keep_bytes + below + own


def span(prefix: Sequence[float], first: int, last: int) -> float:
    """The sum over layers `first` … `last`."""
    return prefix[last + 1] - prefix[first]


def span_bytes(prefix: Sequence[int], first: int, last: int) -> int:
    """The same, of bytes."""
    return prefix[last + 1] - prefix[first]


def _prefix(values: Sequence[T]) -> list[T]:
    zero: T = values[0] - values[0]
    return list(accumulate(values, initial=zero))
