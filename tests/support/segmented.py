"""Every way to cut layers into segments, and stacks that can be gone through in such an order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from synthetic import random_stack, with_gradients

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import bottom_layer
from adjcomp.passes.layermajor import Segment


def every_segmentation(costs: StackCosts) -> Iterator[tuple[Segment, ...]]:
    """All cuts into two segments and more, each with every choice of those that are held."""
    bottom, last = bottom_layer(costs), costs.head
    for cuts in itertools.product((False, True), repeat=last):
        ends = [*(layer for layer, cut in enumerate(cuts) if cut), last]
        if len(ends) > 1 and ends[0] >= bottom:
            firsts = [0, *(end + 1 for end in ends[:-1])]
            for held in itertools.product((False, True), repeat=len(ends)):
                yield tuple(map(Segment, firsts, ends, held))


def layered_stack(seed: int) -> StackCosts:
    """A random stack with gradients by layer, of which no VJP reads what its tile made."""
    costs = with_gradients(random_stack(seed, layers=1 + seed % 4, chunks=2 + seed % 3), seed)

    def without(tiles: tuple[TileCost, ...]) -> tuple[TileCost, ...]:
        return tuple(replace(tile, reads_output=False) for tile in tiles)

    return replace(costs, layers=without(costs.layers), last_layers=without(costs.last_layers))
