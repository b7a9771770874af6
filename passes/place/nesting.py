"""Recomputation over layers, for many chunks at once: residual chunks are stored after some layers, others made from those.

With stored chunks of layer p's input, and room for m more beside one chunk of cotangents, layers p … p+n-1 are reversed in

    R(p, n, m) = min over 0 < j < n of  forward(p … p+j-1) + R(p+j, n-j, m-1) + R(p, j, m),      R(p, 1, m) = keep(p) +
    adjoint(p)

seconds, as in `adjcomp.passes.schedule.nested` with layers in the place of chunks. W is what follows the forward, which stores on
its way for nothing; what the head reads takes the place of the cotangents that it makes. V is W without what may come before the
adjoints of the top layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from adjcomp.passes.place.problem import Problem
from adjcomp.passes.schedule.needs import NEVER

FAR = float(NEVER)


@dataclass(frozen=True)
class Piece:
    """One piece of a range's backward: advance from layer `first` to layer `end`, or, if equal, reverse layer `first`."""

    first: int
    end: int


class LayerNesting:
    """The recursion over layers, for every number of stored residual chunks up to `most`; seconds of one chunk."""

    def __init__(self, problem: Problem, most: int) -> None:
        tiles, size = problem.costs.layers, problem.head + 1
        self.size, self.bottom, self.most = size, problem.bottom, min(most, size - 1)
        forward = np.array([t.forward_seconds for t in tiles])
        self.start = np.concatenate(([0.0], forward.cumsum()))
        self.single = np.array([t.keep_seconds + t.adjoint_seconds if t.has_vjp else 0.0 for t in tiles])
        self.reverse = np.full((self.most + 1, size + 1, size + 1), FAR)  # R[m, p, n]
        self.split = np.zeros(self.reverse.shape, np.int64)
        self.after = np.full((self.most + 1, size), FAR)  # W[m, p] of the layers from p up to the head, without it
        self.after_split = np.zeros(self.after.shape, np.int64)
        self.waiting = np.full(self.after.shape, FAR)  # V[m, p]: the same without what comes before the adjoints of the last one
        for room in range(self.most + 1):
            self._fill(room)
            self._fill_after(room)

    def _fill(self, room: int) -> None:
        """R for `room` free places; up to room + 1 layers one place less doesn't matter."""
        best = self.reverse[room]
        best[:, 0] = 0.0
        best[: self.size, 1] = self.single
        for n in range(2, self.bottom + 1):
            best[: self.bottom - n + 1, n] = 0.0
        if room == 0:
            return
        best[:, 2 : room + 1] = self.reverse[room - 1][:, 2 : room + 1]
        self.split[room][:, : room + 1] = self.split[room - 1][:, : room + 1]
        for n in range(max(2, room + 1), self.size + 1):
            p, j = np.arange(max(0, self.bottom - n + 1), self.size - n + 1)[:, None], np.arange(1, n)[None, :]
            if not len(p):
                continue
            ways = self.start[p + j] - self.start[p] + self.reverse[room - 1][p + j, n - j] + best[p, j]
            k = np.argmin(ways, axis=1)
            best[p[:, 0], n], self.split[room][p[:, 0], n] = ways[np.arange(len(p)), k], k + 1

    def _fill_after(self, room: int) -> None:
        """W and V for `room` free places."""
        end = self.size - 1
        self.after[room, end] = self.waiting[room, end] = 0.0
        for p in range(end - 1, -1, -1):
            j = np.arange(1, end - p + 1)
            rest = np.append(self.after[room - 1, p + 1 : end], 0.0) if room else np.where(p + j < end, FAR, 0.0)
            ways = rest + self.reverse[room][p, j]
            k = int(np.argmin(ways))
            self.after[room, p], self.after_split[room, p] = min(float(ways[k]), FAR), k + 1
            self.waiting[room, p] = self.single[p] if p == end - 1 else FAR
            if room and p < end - 1:
                j = np.arange(1, end - p)
                self.waiting[room, p] = min(FAR, float((self.waiting[room - 1, p + j] + self.reverse[room][p, j]).min()))

    def seconds(self, room: int) -> float:
        """Seconds of a chunk's backward below the head with `room` stored residual chunks."""
        return float(self.after[min(room, self.most), 0])

    def shortest(self, room: int) -> float:
        """The same without what comes before the adjoints of the top layer."""
        return float(self.waiting[min(room, self.most), 0])

    def pieces(self, room: int) -> tuple[Piece, ...]:
        """The backward in order: the segments that the forward left, last first."""
        p, room, end = 0, min(room, self.most), self.size - 1
        segments = []
        while p < end:
            j = int(self.after_split[room, p])
            segments.append((p, j, room))
            p, room = p + j, room - 1
        below = (piece for segment in reversed(segments) for piece in self._segment(*segment))
        return (Piece(end, end), *below)

    def _segment(self, p: int, n: int, room: int) -> Iterator[Piece]:
        while n > 1 and p + n > self.bottom:
            j = int(self.split[room, p, n])
            yield Piece(p, p + j)
            yield from self._segment(p + j, n - j, room - 1)
            n = j
        yield Piece(p, p)
