"""What the pieces of a nested plan need of the budget, whether all stored borders are on the device or the deepest on the host.

Of l borders stored, the chunk at work has one on the device; of the l - 1 others the first `places` are on the host. Where the
next border comes from there while a chunk is reversed, it takes the place of the chunk's own, layer by layer: so a whole set is
counted all the time, as in spilled plans (`adjcomp.passes.schedule.away`), or two where borders are brought ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from adjcomp.ir.values import has_carry
from adjcomp.passes.nesting import Tier
from adjcomp.passes.schedule.column import Column
from adjcomp.passes.schedule.instance import Instance, Menu, fetching_ahead

MOST_CHUNKS = 4096  # of a nested plan
MOST_REPEATS = 3  # advances over each chunk that the fewest stored borders may cost
NEVER = 1 << 60  # ticks or bytes of what can't be


def least_stored(chunk_count: int) -> int:
    """The fewest stored borders with which `chunk_count` chunks are reversed in at most MOST_REPEATS advances over each.

    With l borders besides that of the chunk at work, and r advances over each, (l + r over r) chunks can be reversed.
    """
    stored = 1
    while math.comb(stored + MOST_REPEATS, MOST_REPEATS) < chunk_count:
        stored += 1
    return stored + 1


@dataclass(frozen=True)
class Host:
    """The host under a nested plan."""

    spilled: Instance  # plans that spill all borders: what a chunk needs beside the place for a set of borders, or for two
    places: int  # sets of borders

    @property
    def tier(self) -> Tier:
        """What the plan is written with."""
        return Tier(self.places, self.spilled.spill is not None and self.spilled.spill.ahead)

    def brought_ahead(self) -> Host:
        """The same with a second set of borders on the device."""
        return Host(fetching_ahead(self.spilled), self.places)


class Needs:
    """What the pieces need; bytes. `stored` counts stored borders, that of the chunk at work included."""

    def __init__(self, instance: Instance, host: Host | None = None) -> None:
        self.instance, self.host = instance, host
        self.places = 0 if host is None else host.places
        column = instance.lean_menu.column
        self.border = sum(column.border_in)
        self._backward = instance.backward_bytes + sum(column.adjoint_in)
        layers = self.advanced_layers
        self._advance_stored, self._advance_dropped = (_sweep(column, layers, keep) for keep in (True, False))
        self._forward_stored, self._forward_dropped = (_sweep(column, column.head + 1, keep) for keep in (True, False))

    @cached_property
    def advanced_layers(self) -> int:
        """How many layers an advance runs: up to the highest that hands on a state."""
        return max((k + 1 for k, tile in enumerate(self.instance.costs.layers) if has_carry(tile)), default=0)

    def beside(self, stored: int) -> int:
        """Bytes of the stored borders on the device, but that of the chunk at work."""
        return self.border * max(0, stored - 1 - self.places)

    def brings(self, stored: int) -> bool:
        """Whether the next border comes from the host while a chunk is reversed."""
        return 2 <= stored <= self.places + 1

    def reversing(self, stored: int, *, last: bool) -> Menu:
        """The options of a chunk that is reversed beside `stored` - 1 other borders; of the `last` one, or of others."""
        instance = self.instance
        if self.host is not None and self.brings(stored):
            instance = self.host.spilled
        elif stored == 1 and not last:
            return instance.lean_first  # beside no other border there is only the first chunk
        return instance.menus[2] if last else instance.lean_menu

    def advance(self, stored: int, chunks: int) -> int:
        """Advancing over `chunks` chunks beside `stored` borders, that of the first included."""
        return self._backward + self._moving(stored, chunks, self._advance_stored, self._advance_dropped)

    def forward(self, stored: int, chunks: int) -> int:
        """The first forward over `chunks` chunks of which the first has its border stored, the `stored`-th so far."""
        return self.instance.resident_bytes + self._moving(stored, chunks, self._forward_stored, self._forward_dropped)

    def _moving(self, stored: int, chunks: int, storing: int, dropping: int) -> int:
        """The same without what is fixed, from the peak of one chunk that keeps its border on the device, or drops it."""
        if stored <= self.places:
            return dropping
        return self.beside(stored) + max(storing, dropping + self.border if chunks > 1 else 0)

    def minimum(self) -> int:
        """The smallest budget of a nested plan."""
        count = self.instance.costs.chunk_count
        if not 3 <= count <= MOST_CHUNKS or self.border == 0:
            return NEVER
        stored = least_stored(count)
        depths = range(1, stored + 1)
        reverse = max(int(self.reversing(depth, last=False).need.min()) + self.beside(depth) for depth in depths)
        last = int(self.reversing(stored, last=True).need.min()) + self.beside(stored)
        moving = max(max(self.advance(depth, 2), self.forward(depth, 2)) for depth in depths[:-1])
        return max(reverse, last, moving, self.forward(stored, 1), self.instance.fixed_bytes)


def _sweep(column: Column, layers: int, keep_border: bool) -> int:
    """Peak bytes of a forward through the first `layers` layers that holds nothing, its incoming border included."""
    live = peak = sum(column.border_in)
    for k, tile in enumerate(column.tiles[:layers]):
        peak = max(peak, live + tile.forward_workspace_bytes)
        live += (tile.stream_bytes if k < column.head else 0) - (column.tiles[k - 1].stream_bytes if k else 0)
        live += column.border_out[k] - (0 if keep_border else column.border_in[k])
    return peak


def nested_minimum(instance: Instance, host: Host | None = None) -> int:
    """The smallest budget of a nested plan."""
    return Needs(instance, host).minimum()
