"""Contiguous time ranges to devices: every device has all layers and some chunks.

A device takes one layer after the other over its whole range, because the next device needs the state after the range before it
can start the same layer: the devices follow each other like a wavefront over (range, layer), and the adjoint states run back
the same way. The residual chunks of a range are stored after some layers only; the others are recomputed from those by the
recursion of `adjcomp.passes.schedule.nested`, with layers in the place of chunks:

    R(p, n, m) = min over 0 < j < n of  forward(p … p+j-1) + R(p+j, n-j, m-1) + R(p, j, m),      R(p, 1, m) = keep(p) +
    adjoint(p),

for layers p … p+n-1 from their stored input, with room for m more beside one chunk of cotangents for each of the range. W is what
follows the forward, which stores on its way for nothing; what the head reads takes the place of the cotangents that it makes.

Time, for n[d] chunks on device d. Let the layers i … l be those that hand a state on, f and b = keep + adjoint the seconds of
their tiles, H all seconds of the head, F those of the forwards i … l, V those of the backward l … i without the recomputation
before the adjoints of layer l, the rest R. Device d can't start layer i before the devices in front of it have passed the state
on; it can't start the adjoints of layer l before the devices behind it have taken layer l forward and back, and the last one the
head; and after its own adjoints of layer i the devices in front of it have theirs to do. A tile's recomputation may come before
the adjoint state that it waits for, so one keep is left out for each device:

    T >= sum(n[e] f_i, e < d) + n[d] F + max(n[d] H, sum(n[e] (f_l + b_l) - keep_l, e > d) + n[D-1] H) + n[d] V - keep_l
         + sum(n[e] b_i - keep_i, e < d),
    T >= n[d] (F + W + H + R).

The ranges are the solution of this linear program, rounded; its value, with all the room that a device can have, is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import has_carry
from adjcomp.passes.place.problem import Problem, span
from adjcomp.passes.schedule.nested import NEVER

Floats = np.typing.NDArray[np.float64]
FAR = float(NEVER)


@dataclass(frozen=True)
class Piece:
    """One piece of a range's backward: advance from layer `first` to layer `end`, or, if equal, reverse layer `first`."""

    first: int
    end: int


@dataclass(frozen=True)
class Ranges:
    """A time placement: chunks of every device, and the backward that all of them follow."""

    cuts: tuple[int, ...]  # first chunk of each device, then the number of chunks
    pieces: tuple[Piece, ...]
    stored: int  # layers after which residual chunks are stored at once
    seconds: float  # expected of the slowest device
    bound_seconds: float  # that no ranges go below


class LayerNesting:
    """The recursion over layers, for every number of stored residual chunks up to `most`; seconds of one chunk."""

    def __init__(self, problem: Problem, most: int) -> None:
        tiles, size = problem.costs.layers, problem.head + 1
        self.size, self.most = size, min(most, size - 1)
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
        if room == 0:
            return
        best[:, : room + 1] = self.reverse[room - 1][:, : room + 1]
        self.split[room][:, : room + 1] = self.split[room - 1][:, : room + 1]
        for n in range(max(2, room + 1), self.size + 1):
            p, j = np.arange(self.size - n + 1)[:, None], np.arange(1, n)[None, :]
            ways = self.start[p + j] - self.start[p] + self.reverse[room - 1][p + j, n - j] + best[p, j]
            k = np.argmin(ways, axis=1)
            best[p[:, 0], n], self.split[room][p[:, 0], n] = ways[p[:, 0], k], k + 1

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
        while n > 1:
            j = int(self.split[room, p, n])
            yield Piece(p, p + j)
            yield from self._segment(p + j, n - j, room - 1)
            n = j
        yield Piece(p, p)


def ranges(problem: Problem) -> Ranges | None:
    """The best time placement; None where no number of stored residual chunks fits."""
    count, rooms = problem.costs.chunk_count, range(problem.head)
    planned, possible = (
        {stored: most for stored in rooms if sum(most := _most_chunks(problem, stored, spare=spare)) >= count}
        for spare in (True, False)
    )
    if not planned:
        return None
    nesting = LayerNesting(problem, max(possible))
    bound = min(_balance(problem, nesting, stored, most)[0] for stored, most in possible.items())
    best: Ranges | None = None
    for stored, most in planned.items():
        value, sizes = _balance(problem, nesting, stored, most)
        if value < FAR and (best is None or value < best.seconds):
            whole = _rounded(sizes, most, count)
            expected = _expected(problem, _Times(problem, nesting, stored), whole)
            if best is None or expected < best.seconds:
                cuts = tuple(accumulate(whole, initial=0))
                best = Ranges(cuts, nesting.pieces(stored), stored, expected, bound)
    return best


def _most_chunks(problem: Problem, stored: int, *, spare: bool) -> list[int]:
    """Chunks of every device's range with room for the residual chunks of `stored` layers.

    spare: with room for all that moves besides. Without, it is what no plan exceeds.
    """
    costs, sums = problem.costs, problem.sums
    resident, turn = problem.residency.on(0, problem.head)
    tiles, inner = costs.layers, costs.layers[: problem.head]
    used = sum(resident.values()) + sum(turn.values())
    if spare:
        work = max(
            max(t.forward_workspace_bytes, t.keep_workspace_bytes, t.keep_bytes + t.adjoint_workspace_bytes) for t in tiles
        )
        stream, cotangent = max(t.stream_bytes for t in inner), max(t.cotangent_bytes for t in inner)
        used += max(work, *costs.publish_bytes) + 3 * stream + 3 * cotangent + sums.border_bytes[-1] + 3 * sums.adjoint_bytes[-1]
        each = stored * stream + max(stream, cotangent) + sums.border_bytes[-1]
    else:
        each = stored * min(t.stream_bytes for t in inner) + min(max(t.stream_bytes, t.cotangent_bytes) for t in inner)
        each += sum(t.carry_bytes for t in tiles if t.has_vjp)
    return [min(max(0, site.budget_bytes - used) // max(each, 1), costs.chunk_count) for site in problem.sites]


def _balance(problem: Problem, nesting: LayerNesting, stored: int, most: Sequence[int]) -> tuple[float, list[float]]:
    """The linear program: seconds of the slowest device, and the (fractional) chunks of each."""
    from ortools.linear_solver import pywraplp

    if nesting.seconds(stored) >= FAR:
        return FAR, []
    costs, devices, times = problem.costs, range(len(problem.sites)), _Times(problem, nesting, stored)
    pace = [1 / site.speed for site in problem.sites]
    solver = pywraplp.Solver.CreateSolver("GLOP")
    chunks = [solver.NumVar(0.0, float(most[d]), f"chunks_{d}") for d in devices]
    slowest = solver.NumVar(0.0, solver.infinity(), "slowest")
    solver.Add(sum(chunks) == costs.chunk_count - 1 + _last_share(costs))
    for d in devices:
        solver.Add(slowest >= chunks[d] * (pace[d] * times.everything))
        front = sum(chunks[e] * (pace[e] * (times.first_forward + times.first_back)) for e in range(d))
        spared = times.last_keep * pace[d] + times.first_keep * sum(pace[:d])
        path = front + chunks[d] * (pace[d] * (times.forward + times.back)) - spared
        solver.Add(slowest >= path + chunks[d] * (pace[d] * times.head))
        behind = sum(chunks[e] * (pace[e] * (times.last_forward + times.last_back)) for e in devices if e > d)
        behind -= times.last_keep * sum(pace[d + 1 :])
        solver.Add(slowest >= path + behind + chunks[-1] * (pace[-1] * times.head))
    solver.Minimize(slowest)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("the balance of ranges has no solution although the ranges fit")
    return solver.Objective().Value(), [chunk.solution_value() for chunk in chunks]


def _last_share(costs: StackCosts) -> float:
    """How much of another chunk the last one is at least, in every time of every tile."""
    names = ("forward_seconds", "keep_seconds", "adjoint_seconds")
    pairs: list[tuple[float, float]] = [
        (getattr(b, n), getattr(a, n)) for a, b in zip(costs.layers, costs.last_layers, strict=True) for n in names
    ]
    return min([1.0, *(last / inner for last, inner in pairs if inner > 0)])


class _Times:
    """Seconds of one chunk at speed 1, by the words of the linear program."""

    def __init__(self, problem: Problem, nesting: LayerNesting, stored: int) -> None:
        costs, head = problem.costs, problem.costs.layers[-1]
        carrying = [k for k, tile in enumerate(costs.layers[:-1]) if has_carry(tile) and tile.has_vjp]
        forwards = span(problem.sums.forward, 0, problem.head)
        head_back = head.keep_seconds + head.adjoint_seconds
        self.everything = forwards + nesting.seconds(stored) + head_back
        self.first_forward = self.first_keep = self.first_back = self.last_forward = self.last_keep = self.last_back = 0.0
        self.forward = self.back = self.head = 0.0
        if not carrying:
            return
        first, last = costs.layers[carrying[0]], costs.layers[carrying[-1]]
        ends = [costs.last_layers[k].keep_seconds for k in (carrying[0], carrying[-1])]
        self.first_keep, self.last_keep = max(first.keep_seconds, ends[0]), max(last.keep_seconds, ends[1])
        self.first_forward, self.last_forward = first.forward_seconds, last.forward_seconds
        self.first_back = first.keep_seconds + first.adjoint_seconds
        self.last_back = last.keep_seconds + last.adjoint_seconds
        self.forward = span(problem.sums.forward, carrying[0], carrying[-1])
        if carrying[-1] == problem.head - 1:
            self.head = head.forward_seconds + head_back if not has_carry(head) else 0.0
            self.back = nesting.shortest(stored) - float(nesting.single[: carrying[0]].sum()) - nesting.start[carrying[0]]
        self.back = max(self.back, float(nesting.single[carrying[0] : carrying[-1] + 1].sum()))


def _expected(problem: Problem, times: _Times, chunks: Sequence[int]) -> float:
    """Seconds of the slowest device with whole chunks; nothing of a tile's recomputation comes before its time."""
    paces = [1 / site.speed for site in problem.sites]
    worked = [count * pace for count, pace in zip(chunks, paces, strict=True)]
    end = next(work for work in reversed(worked) if work > 0)
    slowest = 0.0
    for d, work in enumerate(worked):
        front = sum(worked[:d]) * (times.first_forward + times.first_back)
        behind = sum(worked[d + 1 :]) * (times.last_forward + times.last_back) + end * times.head
        waiting = front + work * (times.forward + times.back) + max(work * times.head, behind)
        slowest = max(slowest, work * times.everything, waiting if work > 0 else 0.0)
    return slowest


def _rounded(sizes: Sequence[float], most: Sequence[int], count: int) -> tuple[int, ...]:
    """Whole chunks: rounded down, and the rest to those with the largest remainders that have room."""
    whole = [int(size + 1e-9) for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda d: (whole[d] - sizes[d], d))
    while sum(whole) < count:
        for d in by_remainder:
            if sum(whole) < count and whole[d] < most[d]:
                whole[d] += 1
    return tuple(whole)
