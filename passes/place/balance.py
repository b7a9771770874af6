"""Contiguous time ranges to devices, joined by summaries: how many chunks each, and what they store.

A device takes one layer after the other over its range, as when ranges hand states on (`adjcomp.passes.place.ranges`), but nobody
waits for the forwards or VJPs of another range, only for its summaries. The devices between the first and the last pay for that:
with the seconds sigma and alpha of a chunk's summaries, and with room for the internals of one layer of the whole range. States
pass from one device to the next by way of these summaries, so every device lags behind the one before by a transfer, once.

Let n[d] >= 1 be the chunks of device d, D the last one, f, keep and a (adjoint) the seconds of tiles, F and S all forwards and
summaries of a chunk, H the head's backward, i and l the lowest and the highest layer that summaries speak of. W[m], V[m] are the
backward below the head at depth m, as there with m stored residual chunks; beyond, chunks also hold internals of the highest
layers (`adjcomp.passes.place.holding`): W counts what is left beside all forwards, B what is left after the turn. With
[between] = 1 for devices between the first and the last,

    T >= n[d] (F + H + [between] (S + A)) + sum(x[d, m] W[m], m)                                         for every d,
    turned >= n[D] F,      turned >= n[d] (f_0 + … + f_(k-1) + s(k)) + n[D] (f_k + … + f_head)           for k = i, l and d < D,
    T >= turned + n[D] (H + a_l + … + a_(head-1)) + sum(x[d, m] (V[m] - keep_l), m) + [between] n[d] (A - alpha_l),
    T >= turned + n[D] H + sum(x[D, m] B[m], m),

where s(k) is f_k on the first device, which hands on the state that it has, and the summaries up to layer k on others. Rows of
memory and of the number of chunks are as there; devices that are alike share variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from adjcomp.ir.costs import TileCost
from adjcomp.passes.cost import FEWEST_RANGES
from adjcomp.passes.place.holding import Holding
from adjcomp.passes.place.problem import Problem, span
from adjcomp.passes.place.ranges import MOST_STORED, Ranges, chunk_bytes, depths_of, last_share, rooms_of, rounded

T = TypeVar("T")


def joined_ranges(problem: Problem) -> Ranges | None:
    """The best time placement whose ranges are joined by summaries; None where it doesn't fit or they can't be joined."""
    costs, count = problem.costs, len(problem.sites)
    if not _can_join(problem) or count < FEWEST_RANGES or costs.chunk_count < count:
        return None
    holding = Holding(problem, MOST_STORED)
    rooms = _rooms(problem, spare=True)
    inner, end = (_sizes(holding, last=last) for last in (False, True))
    sizes = [*(count - 1) * [inner], end]
    if not inner:
        return None
    most = [max(0, room) // max(1, min(own.values())) for room, own in zip(rooms, sizes, strict=True)]
    if min(most) < 1 or sum(most) < costs.chunk_count:
        return None
    bound, found = (_Program(problem, holding, spare=spare).solve() for spare in (False, True))
    if bound is None or found is None:
        return None
    whole = rounded(found.chunks, most, costs.chunk_count)
    known: dict[tuple[int, int, bool], tuple[tuple[int, int], ...]] = {}
    chosen = []
    for d, (n, room) in enumerate(zip(whole, rooms, strict=True)):
        key = (n, room, d == count - 1)
        if key not in known:
            known[key] = depths_of(holding, sizes[d], n, room)
        chosen.append(known[key])
    used = sorted({depth for device in known.values() for depth, _ in device})
    seconds = _Rows(problem, [(d,) for d in range(count)]).seconds(holding, chosen)
    cuts = tuple(accumulate(whole, initial=0))
    pieces, held = {depth: holding.pieces(depth) for depth in used}, {depth: holding.held(depth) for depth in used}
    return Ranges(cuts, tuple(chosen), pieces, seconds, bound.seconds, held, joined=True)


def _can_join(problem: Problem) -> bool:
    """Whether ranges of at least one chunk can be joined."""
    costs = problem.costs
    return bool(costs.joins) and all(join.steps <= costs.chunk for join in costs.joins)


def _made(problem: Problem, layers: range) -> int:
    """Bytes that stay with a chunk while the internals of any one of some layers are made, and live, for the whole range."""
    pairs = zip(problem.costs.layers[layers.start : layers.stop], problem.costs.joins[layers.start : layers.stop], strict=True)
    return max((_internals(tile) for tile, join in pairs if join.adjoint_summary_bytes), default=0)


def _internals(tile: TileCost) -> int:
    return tile.keep_bytes + (tile.stream_bytes if tile.reads_output else 0)


def _chunk_bytes(holding: Holding, depth: int, *, last: bool) -> int:
    """Bytes of a chunk of a range; the last range never has internals of more than one chunk but for those that it holds."""
    problem, held = holding.problem, holding.held_bytes(depth)
    stored, head = chunk_bytes(problem, holding.stored(depth)), problem.head
    if last:
        return stored + held
    return stored + max(held + _made(problem, range(head, head + 1)), _made(problem, range(head - holding.held(depth))))


def _sizes(holding: Holding, *, last: bool) -> dict[int, int]:
    """Bytes of a chunk by depth, rising, without depths that take more time and no less memory than others."""
    found: dict[int, int] = {}
    fastest = math.inf
    for size, depth in sorted((_chunk_bytes(holding, depth, last=last), depth) for depth in holding.depths):
        if holding.seconds(depth) < fastest:
            found[depth], fastest = size, holding.seconds(depth)
    return found


def _rooms(problem: Problem, *, spare: bool) -> list[int]:
    """Bytes of every device for the places of chunks; `spare`: without what is on the move besides, which a bound leaves out."""
    rooms, joins = rooms_of(problem, spare=spare), problem.costs.joins
    if not spare:  # internals are counted with the chunks
        made = _made(problem, range(problem.head + 1))
        return [room + (made if d < len(rooms) - 1 else 0) for d, room in enumerate(rooms)]
    coming = sum(join.halo_bytes + join.halo_adjoint_bytes for join in joins)
    moving = 2 * max(max(join.summary_bytes, join.adjoint_summary_bytes) for join in joins)
    moving += 2 * max(tile.carry_bytes for tile in problem.costs.layers)
    work = max(max(join.summarize_workspace_bytes, join.tail_workspace_bytes) for join in joins)
    known = max(tile.keep_bytes + tile.adjoint_workspace_bytes for tile in problem.costs.layers if tile.has_vjp)
    return [room - coming - moving - max(0, work - known) for room in rooms]


@dataclass(frozen=True)
class _Found:
    """A solution of the linear program: seconds of the slowest device, and the (fractional) chunks of each."""

    seconds: float
    chunks: list[float]


@dataclass(frozen=True)
class _Sums(Generic[T]):
    """W, V and B, of one chunk or summed over those of a device: numbers, or a solver's expressions."""

    whole: T
    short: T
    back: T


def _summed(parts: Sequence[tuple[Any, _Sums[float]]]) -> _Sums[Any]:
    """Over so many chunks each."""
    return _Sums(*(sum(n * getattr(times, name) for n, times in parts) for name in ("whole", "short", "back")))


class _Rows:
    """The rows of time, for numbers as well as for a solver's variables; `groups`: devices that are alike, the last one alone."""

    def __init__(self, problem: Problem, groups: Sequence[tuple[int, ...]]) -> None:
        self.problem, self.groups, sums = problem, groups, problem.sums
        self.pace = [1 / problem.sites[group[0]].speed for group in groups]
        self.ends = [group[0] in (0, len(problem.sites) - 1) for group in groups]  # those that summarize nothing
        self.tails = [group[0] < len(problem.sites) - 2 for group in groups]  # those that add to gradients for halos
        tiles, head = problem.costs.layers, problem.head
        self.backs = [t.keep_seconds + t.adjoint_seconds if t.has_vjp else 0.0 for t in tiles]
        self.adjoint_seconds = [t.adjoint_seconds if t.has_vjp else 0.0 for t in tiles]
        self.forward = span(sums.forward, 0, head)
        joins = problem.costs.joins
        self.summaries = list(accumulate((j.summarize_seconds if j.summary_bytes else 0.0 for j in joins), initial=0.0))
        self.adjoints = sum(j.adjoint_summarize_seconds for j in joins if j.adjoint_summary_bytes)
        self.settling = sum(j.settle_seconds + j.adjoint_settle_seconds for j in joins)
        self.halos, self.halo_vjps = sum(j.tail_seconds for j in joins), sum(j.tail_vjp_seconds for j in joins)
        self.speaking = [k for k in range(head) if joins[k].summary_bytes]
        self.passing = [k for k in range(head) if joins[k].adjoint_summary_bytes]

    def turned(self, chunks: Sequence[Any]) -> Iterator[Any]:
        """What the end of all forwards isn't before, from the chunks of one device of each group."""
        forward, end = self.problem.sums.forward, chunks[-1] * self.pace[-1]
        yield end * self.forward
        for layer in dict.fromkeys((*self.speaking[:1], *self.speaking[-1:])):
            rest = end * span(forward, layer, self.problem.head)
            for q, alone in enumerate(self.ends[:-1]):
                own = forward[layer + 1] - forward[layer] if alone else self.summaries[layer + 1]
                yield chunks[q] * (self.pace[q] * (forward[layer] + own)) + rest

    def end(self, turned: Any, chunks: Sequence[Any], sums: Sequence[_Sums[Any]]) -> Iterator[Any]:
        """What the end of the step isn't before, from the chunks of one device of each group, and sums over them."""
        outside = self.forward + self.backs[-1]
        for q, alone in enumerate(self.ends):
            extra = 0.0 if alone else self.summaries[-1] + self.adjoints
            once = (0.0 if alone else self.settling) + (self.halos if q < len(self.groups) - 1 else 0.0)
            once += self.halo_vjps if self.tails[q] else 0.0
            yield chunks[q] * (self.pace[q] * (outside + extra)) + sums[q].whole * self.pace[q] + self.pace[q] * once
        if not self.passing:
            return
        top = self.passing[-1]
        first = turned + chunks[-1] * (self.pace[-1] * (sum(self.adjoint_seconds[top:-1]) + self.backs[-1]))
        below = self.adjoints - self.problem.costs.joins[top].adjoint_summarize_seconds
        for q, alone in enumerate(self.ends[:-1]):
            yield first + sums[q].short * self.pace[q] + chunks[q] * (0.0 if alone else self.pace[q] * below)
        yield turned + chunks[-1] * (self.pace[-1] * self.backs[-1]) + sums[-1].back * self.pace[-1]

    def times(self, holding: Holding, depth: int) -> _Sums[float]:
        """W, V and B of one chunk; V without the recomputation of the top layer, which may come before its adjoint states."""
        short = holding.shortest(depth, self.passing[-1]) if self.passing else 0.0
        return _Sums(holding.seconds(depth), short, holding.backward(depth))

    def seconds(self, holding: Holding, depths: Sequence[Sequence[tuple[int, int]]]) -> float:
        """Of whole chunks."""
        chunks = [sum(n for _, n in device) for device in depths]
        sums = [_summed([(n, self.times(holding, depth)) for depth, n in device]) for device in depths]
        return float(max(self.end(max(self.turned(chunks)), chunks, sums)))


class _Program:
    """The linear program; devices that are alike share variables."""

    def __init__(self, problem: Problem, holding: Holding, *, spare: bool) -> None:
        from ortools.linear_solver import pywraplp

        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        rooms, count = _rooms(problem, spare=spare), len(problem.sites)
        self.groups = _alike(problem, rooms)
        rows, self.share = _Rows(problem, self.groups), last_share(problem.costs)
        options = [(depth, rows.times(holding, depth)) for depth in holding.depths]
        if not spare and holding.full is None:  # everything stored, in the room of one more than the most
            everything = float(holding.nesting.single[: problem.head].sum())
            most = holding.nesting.most
            options.append((most + 1, _Sums(everything, rows.times(holding, most).short, everything)))
        limit, infinity = float(problem.costs.chunk_count), self.solver.infinity()
        self.chunks, sums = [], []
        for q, group in enumerate(self.groups):
            last = group[0] == count - 1
            parts = [self.solver.NumVar(0.0, limit, f"x_{q}_{depth}") for depth, _ in options]
            self.chunks.append(self.solver.NumVar(self.share if last else 1.0, limit, f"chunks_{q}"))
            self.solver.Add(sum(parts) == self.chunks[-1])
            used = sum(_chunk_bytes(holding, depth, last=last) * x for x, (depth, _) in zip(parts, options, strict=True))
            self.solver.Add(used <= max(rooms[group[0]], 0))
            sums.append(_summed([(x, times) for x, (_, times) in zip(parts, options, strict=True)]))
        total = sum(len(group) * own for group, own in zip(self.groups, self.chunks, strict=True))
        self.solver.Add(total == problem.costs.chunk_count - 1 + self.share)
        turned, slowest = (self.solver.NumVar(0.0, infinity, name) for name in ("turned", "slowest"))
        for row in rows.turned(self.chunks):
            self.solver.Add(turned >= row)
        for row in rows.end(turned, self.chunks, sums):
            self.solver.Add(slowest >= row)
        self.solver.Minimize(slowest)

    def solve(self) -> _Found | None:
        """The optimum; None where a device has no room for a chunk of its own."""
        if self.solver.Solve() != self.solver.OPTIMAL:
            return None
        by_device = {d: own.solution_value() for group, own in zip(self.groups, self.chunks, strict=True) for d in group}
        chunks = [by_device[d] for d in sorted(by_device)]
        chunks[-1] += 1 - self.share
        return _Found(self.solver.Objective().Value(), chunks)


def _alike(problem: Problem, rooms: Sequence[int]) -> list[tuple[int, ...]]:
    """Devices by what a row of theirs depends on; the last one comes last, and alone."""
    count = len(problem.sites)
    found: dict[tuple[object, ...], list[int]] = {}
    for d in range(count):
        place = "first" if d == 0 else "last" if d == count - 1 else "before the last" if d == count - 2 else "between"
        found.setdefault((place, rooms[d], problem.sites[d].speed), []).append(d)
    return [tuple(group) for group in found.values()]
