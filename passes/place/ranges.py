"""Contiguous time ranges to devices: every device has all layers and some chunks.

A device takes one layer after the other over its whole range, because the next device needs the state after the range before it
can start the same layer: the devices follow each other like a wavefront over (range, layer), and the adjoint states run back
the same way. Residual chunks are stored after some layers only: every chunk of a range has places of its own in memory for as
many as there is room for. The others are recomputed (`adjcomp.passes.place.nesting`).

Let x[d, m] be the chunks on device d with room for m stored residual chunks each, and n[d] their sum over m. Let the layers i … l
be those that hand a state on, f and b = keep + adjoint the seconds of their tiles, H all seconds of the head, F those of the
forwards i … l, W[m] and V[m] those of the backward below the head, the latter between the first adjoint of l and the last of i.
No device a can start layer i before the devices in front of it have passed the state on, and those behind it take the last layer
after it; the adjoints start with the head on the last device, come to device b through the last layer of those behind it, and go
on through the first layer of those in front. A tile's recomputation may come before the adjoint state that it waits for, so one
keep is left out for each device:

    turned >= sum(n[e] f_i, e < a) + n[a] F + sum(n[e] f_l, e > a)                                            for every a,
    T >= turned + n[D-1] H + sum(n[e] b_l - keep_l, e > b) + back[b]                                         for every b,
    T >= sum(n[e] f_i, e < b) + n[b] (F + H) + back[b],
    back[b] = sum(x[b, m] V[m], m) - keep_l + sum(n[e] b_i - keep_i, e < b),
    T >= sum(x[d, m] (all forwards + H + W[m]), m),
    sum(x[d, m] bytes[m], m) <= room of device d,      sum(n) = number of chunks.

The ranges are the solution of this linear program, rounded. With all the room that a device can have it is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import has_carry
from adjcomp.passes.place.holding import Holding
from adjcomp.passes.place.nesting import FAR, LayerNesting, Piece
from adjcomp.passes.place.problem import Problem, span

MOST_STORED = 64  # residual chunks stored at once; the bound lets everything be stored in the room of one more


@dataclass(frozen=True)
class Ranges:
    """A time placement: chunks of every device, and the backward that they follow."""

    cuts: tuple[int, ...]  # first chunk of each device, then the number of chunks
    depths: tuple[
        tuple[tuple[int, int], ...], ...
    ]  # by device: (stored residual chunks, or a depth of `Holding`; chunks of the range), first chunks first
    pieces: dict[int, tuple[Piece, ...]]  # by depth
    seconds: float  # expected of the slowest device
    bound_seconds: float  # that no ranges go below
    held: Mapping[int, int] = field(default_factory=dict)  # by depth: how many of the highest layers hold their internals
    joined: bool = False  # by summaries; else they hand states on


def ranges(problem: Problem) -> Ranges | None:
    """The best time placement; None where it doesn't fit."""
    rooms = rooms_of(problem, spare=True)
    nesting = LayerNesting(problem, MOST_STORED)
    levels = [stored for stored in range(nesting.most + 1) if nesting.seconds(stored) < FAR]
    least = max(1, chunk_bytes(problem, levels[0])) if levels else 1
    most = [max(0, room) // least if levels else 0 for room in rooms]
    if sum(most) < problem.costs.chunk_count:
        return None
    bound, _ = _Balance(problem, nesting, levels, spare=False).solve()
    _, sizes = _Balance(problem, nesting, levels, spare=True).solve()
    whole = rounded(sizes, most, problem.costs.chunk_count)
    sizes_by_level = {stored: chunk_bytes(problem, stored) for stored in levels}
    depths = tuple(depths_of(nesting, sizes_by_level, count, room) for count, room in zip(whole, rooms, strict=True))
    used = sorted({stored for device in depths for stored, _ in device})
    expected = _expected(problem, nesting, depths)
    cuts = tuple(accumulate(whole, initial=0))
    return Ranges(cuts, depths, {stored: nesting.pieces(stored) for stored in used}, expected, bound)


def rooms_of(problem: Problem, *, spare: bool) -> list[int]:
    """Bytes of every device for the places of chunks; `spare`: without what is on the move besides, which a bound leaves out."""
    costs, sums = problem.costs, problem.sums
    resident, turn = problem.residency.on(0, problem.head)
    work = max(t.keep_bytes + t.adjoint_workspace_bytes for t in costs.layers if t.has_vjp)
    used = sum(resident.values()) + sum(turn.values())
    if spare:
        inner = costs.layers[: problem.head]
        used += max(t.stream_bytes for t in inner) + max(t.cotangent_bytes for t in inner)
        used += 2 * sums.border_bytes[-1] + 3 * sums.adjoint_bytes[-1]
        work = max(work, *(max(t.forward_workspace_bytes, t.keep_workspace_bytes) for t in costs.layers), *costs.publish_bytes)
    return [site.budget_bytes - used - work for site in problem.sites]


def chunk_bytes(problem: Problem, stored: int) -> int:
    """Bytes of a chunk of a range: places for `stored` residual chunks and its cotangents, and its borders."""
    inner = problem.costs.layers[: problem.head]
    place = max(tile.stream_bytes for tile in inner)
    return stored * place + max(place, *(tile.cotangent_bytes for tile in inner)) + problem.sums.border_bytes[-1]


class _Balance:
    """The linear program."""

    def __init__(self, problem: Problem, nesting: LayerNesting, levels: Sequence[int], *, spare: bool) -> None:
        from ortools.linear_solver import pywraplp

        self.problem, self.times = problem, _Times(problem)
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.pace = [1 / site.speed for site in problem.sites]
        self.columns = [(chunk_bytes(problem, m), nesting.seconds(m), nesting.shortest(m)) for m in levels]
        if not spare:
            everything = float(nesting.single[: problem.head].sum())
            self.columns.append((chunk_bytes(problem, levels[-1] + 1), everything, everything))
        limit = float(problem.costs.chunk_count)
        devices = range(len(problem.sites))
        self.parts = [[self.solver.NumVar(0.0, limit, f"x_{d}_{i}") for i in range(len(self.columns))] for d in devices]
        self.chunks = [self.solver.NumVar(0.0, limit, f"chunks_{d}") for d in devices]
        self.slowest = self.solver.NumVar(0.0, self.solver.infinity(), "slowest")
        self.turned = self.solver.NumVar(0.0, self.solver.infinity(), "turned")
        self.solver.Add(sum(self.chunks) == problem.costs.chunk_count - 1 + last_share(problem.costs))
        for d, room in enumerate(rooms_of(problem, spare=spare)):
            self.solver.Add(sum(self.parts[d]) == self.chunks[d])
            self.solver.Add(sum(self.columns[i][0] * part for i, part in enumerate(self.parts[d])) <= max(room, 0))
            self._times(d)
        self.solver.Minimize(self.slowest)

    def _times(self, d: int) -> None:
        """The rows of a device's time."""
        times, pace, chunks, devices = self.times, self.pace, self.chunks, range(len(self.pace))
        whole = sum(part * (pace[d] * self.columns[i][1]) for i, part in enumerate(self.parts[d]))
        between = sum(part * (pace[d] * times.between(self.columns[i][2])) for i, part in enumerate(self.parts[d]))
        self.solver.Add(self.slowest >= chunks[d] * (pace[d] * times.outside) + whole)
        before, behind = range(d), [e for e in devices if e > d]
        front = sum(chunks[e] * (pace[e] * times.first_forward) for e in before)
        forward = front + chunks[d] * (pace[d] * times.forward)
        back = between + sum(chunks[e] * (pace[e] * times.first_back) for e in before)
        back -= times.last_keep * pace[d] + times.first_keep * sum(pace[:d])
        self.solver.Add(self.turned >= forward + sum(chunks[e] * (pace[e] * times.last_forward) for e in behind))
        down = sum(chunks[e] * (pace[e] * times.last_back) for e in behind) - times.last_keep * sum(pace[d + 1 :])
        self.solver.Add(self.slowest >= self.turned + chunks[-1] * (pace[-1] * times.head) + down + back)
        self.solver.Add(self.slowest >= forward + chunks[d] * (pace[d] * times.head) + back)

    def solve(self) -> tuple[float, list[float]]:
        """Seconds of the slowest device, and the (fractional) chunks of each."""
        if self.solver.Solve() != self.solver.OPTIMAL:
            raise RuntimeError("the balance of ranges has no solution although the ranges fit")
        return self.solver.Objective().Value(), [chunk.solution_value() for chunk in self.chunks]


def last_share(costs: StackCosts) -> float:
    """How much of another chunk the last one is at least, in every time of every tile."""
    names = ("forward_seconds", "keep_seconds", "adjoint_seconds")
    pairs: list[tuple[float, float]] = [
        (getattr(b, n), getattr(a, n)) for a, b in zip(costs.layers, costs.last_layers, strict=True) for n in names
    ]
    return min([1.0, *(last / inner for last, inner in pairs if inner > 0)])


class _Times:
    """Seconds of one chunk at speed 1, by the words of the linear program."""

    def __init__(self, problem: Problem) -> None:
        costs, head = problem.costs, problem.costs.layers[-1]
        carrying = [k for k, tile in enumerate(costs.layers[:-1]) if has_carry(tile) and tile.has_vjp]
        head_back = head.keep_seconds + head.adjoint_seconds
        self.outside = span(problem.sums.forward, 0, problem.head) + head_back  # all forwards, and the head's backward
        self.first_forward = self.first_keep = self.first_back = self.last_forward = self.last_keep = self.last_back = 0.0
        self.forward = self.head = self.below = self.least = 0.0
        self.on_top = bool(carrying) and carrying[-1] == problem.head - 1
        if not carrying:
            return
        first, last = costs.layers[carrying[0]], costs.layers[carrying[-1]]
        ends = [costs.last_layers[k].keep_seconds for k in (carrying[0], carrying[-1])]
        self.first_keep, self.last_keep = max(first.keep_seconds, ends[0]), max(last.keep_seconds, ends[1])
        self.first_forward, self.last_forward = first.forward_seconds, last.forward_seconds
        self.first_back = first.keep_seconds + first.adjoint_seconds
        self.last_back = last.keep_seconds + last.adjoint_seconds
        self.forward = span(problem.sums.forward, carrying[0], carrying[-1])
        if self.on_top:
            self.head = head.forward_seconds + head_back if not has_carry(head) else 0.0
        backs = [t.keep_seconds + t.adjoint_seconds if t.has_vjp else 0.0 for t in costs.layers]
        self.below = sum(backs[: carrying[0]]) + span(problem.sums.forward, 0, carrying[0] - 1)
        self.least = sum(backs[carrying[0] : carrying[-1] + 1])

    def between(self, shortest: float) -> float:
        """Of a backward that takes `shortest` from the top layer's first adjoint, what lies before the last one of layer i."""
        return max(self.least, shortest - self.below if self.on_top else 0.0)


def depths_of(nesting: LayerNesting | Holding, sizes: Mapping[int, int], count: int, room: int) -> tuple[tuple[int, int], ...]:
    """How many of `count` chunks store how many residual chunks in `room` bytes: the fastest mixture of two numbers.

    sizes: bytes of a chunk by the residual chunks that it stores, in rising order.
    """
    if count == 0:
        return ()
    best: tuple[float, tuple[tuple[int, int], ...]] | None = None
    for place, (low, small) in enumerate(sizes.items()):
        if count * small > room:
            break
        for high in list(sizes)[place:]:
            more = sizes[high] - small
            deep = min(count, (room - count * small) // more) if more > 0 else count
            seconds = (count - deep) * nesting.seconds(low) + deep * nesting.seconds(high)
            if best is None or seconds < best[0]:
                best = seconds, tuple((m, n) for m, n in ((low, count - deep), (high, deep)) if n > 0)
    if best is None:
        raise RuntimeError("a range doesn't fit on its device")
    return best[1]


def _expected(problem: Problem, nesting: LayerNesting, depths: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Seconds of the slowest device with whole chunks; nothing of a tile's recomputation comes before its time."""
    times, paces = _Times(problem), [1 / site.speed for site in problem.sites]
    worked = [sum(n for _, n in device) * pace for device, pace in zip(depths, paces, strict=True)]
    end = next(work for work in reversed(worked) if work > 0)
    own = [[(m, n * pace) for m, n in device] for device, pace in zip(depths, paces, strict=True)]
    starts = list(accumulate((work * times.first_forward for work in worked), initial=0.0))
    ups = list(accumulate((work * times.last_forward for work in reversed(worked)), initial=0.0))[::-1]
    turned = max(starts[d] + work * times.forward + ups[d + 1] for d, work in enumerate(worked)) + end * times.head
    slowest, down, busy = 0.0, 0.0, [d for d, work in enumerate(worked) if work > 0]
    for d in reversed(busy):
        back = sum(n * times.between(nesting.shortest(m)) for m, n in own[d]) + sum(worked[:d]) * times.first_back
        alone = worked[d] * times.outside + sum(n * nesting.seconds(m) for m, n in own[d])
        slowest = max(slowest, alone, turned + down + back, starts[d] + worked[d] * (times.forward + times.head) + back)
        down += worked[d] * times.last_back
    return slowest


def rounded(sizes: Sequence[float], most: Sequence[int], count: int) -> tuple[int, ...]:
    """Whole chunks: rounded down, and the rest to those with the largest remainders that have room."""
    whole = [min(int(size + 1e-9), limit) for size, limit in zip(sizes, most, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda d: (whole[d] - sizes[d], d))
    while sum(whole) < count:
        for d in by_remainder:
            if sum(whole) < count and whole[d] < most[d]:
                whole[d] += 1
    return tuple(whole)
