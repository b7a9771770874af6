"""What of a chunk stays in memory from the forward to the backward, in the order in which it is worth the bytes.

First residual chunks (`LayerNesting`): they are small, and save a forward of all layers below. Where all of them fit, the
internals of the n highest layers below the head besides: the forward keeps them, and nothing of these layers is computed twice. A
*depth* counts both, 0 … m residual chunks, then m + n.
"""

from __future__ import annotations

import math
from functools import cached_property

from adjcomp.passes.place.nesting import FAR, LayerNesting, Piece
from adjcomp.passes.place.problem import Problem, internals


class Holding:
    """The depths of a problem; seconds of one inner chunk."""

    def __init__(self, problem: Problem, most: int) -> None:
        self.problem, self.nesting = problem, LayerNesting(problem, most)
        tiles = problem.costs.layers[: problem.head]
        single = math.fsum(self.nesting.single[: problem.head]) * (1 + 1e-12)
        rooms = range(self.nesting.most + 1)
        self.full = next((m for m in rooms if self.nesting.seconds(m) <= single), None)  # from which on no advance is left
        self.keeps = [tile.keep_seconds for tile in reversed(tiles[problem.bottom :])]  # of layers below the head, highest first
        self.saves = [tile.forward_seconds for tile in reversed(tiles[problem.bottom :])]

    @cached_property
    def depths(self) -> list[int]:
        """All depths that reverse a chunk, least memory first."""
        last = self.nesting.most if self.full is None else self.full
        stored = [m for m in range(last + 1) if self.nesting.seconds(m) < FAR]
        return stored + [last + n + 1 for n in range(0 if self.full is None else len(self.keeps))]

    def held(self, depth: int) -> int:
        """Layers below the head whose internals are held."""
        return 0 if self.full is None else max(0, depth - self.full)

    def stored(self, depth: int) -> int:
        """Residual chunks that are stored apart from what held internals have."""
        return max(0, depth - 2 * self.held(depth))

    def held_bytes(self, depth: int) -> int:
        """Bytes of the internals that are held, with the residual chunks that their VJPs read."""
        return sum(internals(self.problem.costs, self.problem.head - 1 - i) for i in range(self.held(depth)))

    def seconds(self, depth: int) -> float:
        """Seconds that a chunk takes below the head beside its forward."""
        return self.nesting.seconds(depth) - math.fsum(self.saves[: self.held(depth)])

    def backward(self, depth: int) -> float:
        """Those of them after the forward: a forward that keeps may take longer."""
        return self.nesting.seconds(depth) - math.fsum(self.keeps[: self.held(depth)])

    def shortest(self, depth: int, top: int) -> float:
        """Those from the first adjoint of layer `top` on, without its recomputation, which may come before."""
        tiles = (self.problem.costs.layers[top], self.problem.costs.last_layers[top])
        whole = self.nesting.shortest(depth) if top == self.problem.head - 1 else math.fsum(self.nesting.single[: top + 1])
        above = self.problem.head - 1 - top  # layers over it
        held = math.fsum(self.keeps[above + 1 : self.held(depth)])
        return max(0.0, whole - held - max(tile.keep_seconds for tile in tiles))

    def pieces(self, depth: int) -> tuple[Piece, ...]:
        """The backward in order; what is held isn't made again."""
        return self.nesting.pieces(depth)
