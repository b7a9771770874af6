"""Contiguous time ranges to devices, joined by summaries: how many chunks each, and what they store.

A device takes one layer after the other over its range, as when ranges hand states on (`adjcomp.passes.place.ranges`), but nobody
waits for the forwards or VJPs of another range, only for its summaries. The devices between the first and the last pay for that:
with the seconds sigma and alpha of a chunk's summaries, and with room for the internals of one layer of the whole range. States
pass from one device to the next by way of these summaries, so every device lags behind the one before by a transfer, once.

Let n[d] >= 1 be the chunks of device d, D the last one, f and b = keep + adjoint the seconds of tiles, F and S all forwards and
summaries of a chunk, H the head's backward, i and l the lowest and the highest layer that summaries speak of, and W[m], V[m] the
backward below the head with m stored residual chunks, as there. With [between] = 1 for devices between the first and the last,

    T >= n[d] (F + H + [between] (S + A)) + sum(x[d, m] W[m], m)                                         for every d,
    turned >= n[D] F,      turned >= n[d] (f_0 + … + f_(k-1) + s(k)) + n[D] (f_k + … + f_head)           for k = i, l and d < D,
    T >= turned + n[D] (H + b_l + … + b_(head-1)) + sum(x[d, m] (V[m] - keep_l), m) + [between] n[d] (A - alpha_l),

where s(k) is f_k on the first device, which hands on the state that it has, and the summaries up to layer k on others. Rows of
memory and of the number of chunks are as there; devices that are alike share variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from adjcomp.ir.costs import JoinCost, TileCost
from adjcomp.passes.place.nesting import FAR, LayerNesting
from adjcomp.passes.place.problem import Problem, span
from adjcomp.passes.place.ranges import MOST_STORED, Ranges, chunk_bytes, depths_of, last_share, rooms_of, rounded

FEWEST_DEVICES = 3  # two ranges have nothing to join: the first one hands its state on


def joined_ranges(problem: Problem) -> Ranges | None:
    """The best time placement whose ranges are joined by summaries; None where it doesn't fit or they can't be joined."""
    costs, count = problem.costs, len(problem.sites)
    if not _can_join(problem) or count < FEWEST_DEVICES or costs.chunk_count < count:
        return None
    nesting = LayerNesting(problem, MOST_STORED)
    levels = [stored for stored in range(nesting.most + 1) if nesting.seconds(stored) < FAR]
    rooms = _rooms(problem, spare=True)
    sizes = [{m: _chunk_bytes(problem, m, last=d == count - 1) for m in levels} for d in range(count)]
    most = [max(0, room) // max(1, own[levels[0]]) for room, own in zip(rooms, sizes, strict=True)] if levels else [0]
    if min(most) < 1 or sum(most) < costs.chunk_count:
        return None
    bound = _Program(problem, nesting, levels, spare=False).solve()
    found = _Program(problem, nesting, levels, spare=True).solve()
    if bound is None or found is None:
        return None
    whole = rounded(found.chunks, most, costs.chunk_count)
    known: dict[tuple[int, int, bool], tuple[tuple[int, int], ...]] = {}
    depths = []
    for d, (n, room) in enumerate(zip(whole, rooms, strict=True)):
        key = (n, room, d == count - 1)
        if key not in known:
            known[key] = depths_of(nesting, sizes[d], n, room)
        depths.append(known[key])
    used = sorted({stored for device in known.values() for stored, _ in device})
    seconds = _Rows(problem, [(d,) for d in range(count)]).seconds(nesting, depths)
    cuts = tuple(accumulate(whole, initial=0))
    pieces = {stored: nesting.pieces(stored) for stored in used}
    return Ranges(cuts, tuple(depths), pieces, seconds, bound.seconds, joined=True)


def _can_join(problem: Problem) -> bool:
    """Whether ranges of at least one chunk can be joined."""
    costs = problem.costs
    return bool(costs.joins) and all(join.steps <= costs.chunk for join in costs.joins)


def _kept(problem: Problem) -> int:
    """Bytes that stay with a chunk while the internals of one layer of the whole range are live."""
    return max((_internals(tile) for tile, join in _pairs(problem) if join.adjoint_summary_bytes), default=0)


def _internals(tile: TileCost) -> int:
    return tile.keep_bytes + (tile.stream_bytes if tile.reads_output else 0)


def _pairs(problem: Problem) -> Iterator[tuple[TileCost, JoinCost]]:
    return zip(problem.costs.layers, problem.costs.joins, strict=True)


def _chunk_bytes(problem: Problem, stored: int, *, last: bool) -> int:
    """Bytes of a chunk of a range; the last range never has the internals of more than one of them."""
    return chunk_bytes(problem, stored) + (0 if last else _kept(problem))


def _rooms(problem: Problem, *, spare: bool) -> list[int]:
    """Bytes of every device for the places of chunks; `spare`: without what is on the move besides, which a bound leaves out."""
    rooms, joins = rooms_of(problem, spare=spare), problem.costs.joins
    if not spare:  # internals are counted with the chunks
        return [room + (_kept(problem) if d < len(rooms) - 1 else 0) for d, room in enumerate(rooms)]
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


class _Rows:
    """The rows of time, for numbers as well as for a solver's variables; `groups`: devices that are alike, the last one alone."""

    def __init__(self, problem: Problem, groups: Sequence[tuple[int, ...]]) -> None:
        self.problem, self.groups, sums = problem, groups, problem.sums
        self.pace = [1 / problem.sites[group[0]].speed for group in groups]
        self.ends = [group[0] in (0, len(problem.sites) - 1) for group in groups]  # those that summarize nothing
        self.tails = [group[0] < len(problem.sites) - 2 for group in groups]  # those that add to gradients for halos
        tiles, head = problem.costs.layers, problem.head
        self.backs = [t.keep_seconds + t.adjoint_seconds if t.has_vjp else 0.0 for t in tiles]
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

    def end(self, turned: Any, chunks: Sequence[Any], whole: Sequence[Any], short: Sequence[Any]) -> Iterator[Any]:
        """What the end of the step isn't before; whole, short: W and V summed over the chunks of one device of each group."""
        outside = self.forward + self.backs[-1]
        for q, alone in enumerate(self.ends):
            extra = 0.0 if alone else self.summaries[-1] + self.adjoints
            once = (0.0 if alone else self.settling) + (self.halos if q < len(self.groups) - 1 else 0.0)
            once += self.halo_vjps if self.tails[q] else 0.0
            yield chunks[q] * (self.pace[q] * (outside + extra)) + whole[q] * self.pace[q] + self.pace[q] * once
        if not self.passing:
            return
        top = self.passing[-1]
        first = turned + chunks[-1] * (self.pace[-1] * sum(self.backs[top:]))
        below = self.adjoints - self.problem.costs.joins[top].adjoint_summarize_seconds
        for q, alone in enumerate(self.ends[:-1]):
            yield first + short[q] * self.pace[q] + chunks[q] * (0.0 if alone else self.pace[q] * below)
        yield turned + chunks[-1] * (self.pace[-1] * self.backs[-1]) + whole[-1] * self.pace[-1]

    def shortest(self, nesting: LayerNesting, stored: int) -> float:
        """V[m] without the recomputation of the top layer, which may come before its adjoint states."""
        if not self.passing:
            return 0.0
        top = self.passing[-1]
        keep = max(tile.keep_seconds for tile in (self.problem.costs.layers[top], self.problem.costs.last_layers[top]))
        whole = nesting.shortest(stored) if top == self.problem.head - 1 else sum(self.backs[: top + 1])
        return max(0.0, whole - keep)

    def seconds(self, nesting: LayerNesting, depths: Sequence[Sequence[tuple[int, int]]]) -> float:
        """Of whole chunks."""
        chunks = [sum(n for _, n in device) for device in depths]
        whole = [sum(n * nesting.seconds(m) for m, n in device) for device in depths]
        short = [sum(n * self.shortest(nesting, m) for m, n in device) for device in depths]
        return float(max(self.end(max(self.turned(chunks)), chunks, whole, short)))


class _Program:
    """The linear program; devices that are alike share variables."""

    def __init__(self, problem: Problem, nesting: LayerNesting, levels: Sequence[int], *, spare: bool) -> None:
        from ortools.linear_solver import pywraplp

        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        rooms, count = _rooms(problem, spare=spare), len(problem.sites)
        self.groups = _alike(problem, rooms)
        rows, self.share = _Rows(problem, self.groups), last_share(problem.costs)
        options = [(m, nesting.seconds(m), rows.shortest(nesting, m)) for m in levels]
        if not spare:  # everything stored, in the room of one more than the most
            everything = float(nesting.single[: problem.head].sum())
            options.append((levels[-1] + 1, everything, rows.shortest(nesting, nesting.most)))
        limit, infinity = float(problem.costs.chunk_count), self.solver.infinity()
        self.chunks, whole, short = [], [], []
        for q, group in enumerate(self.groups):
            last = group[0] == count - 1
            parts = [self.solver.NumVar(0.0, limit, f"x_{q}_{m}") for m, _, _ in options]
            self.chunks.append(self.solver.NumVar(self.share if last else 1.0, limit, f"chunks_{q}"))
            self.solver.Add(sum(parts) == self.chunks[-1])
            used = sum(_chunk_bytes(problem, m, last=last) * x for x, (m, _, _) in zip(parts, options, strict=True))
            self.solver.Add(used <= max(rooms[group[0]], 0))
            whole.append(sum(x * seconds for x, (_, seconds, _) in zip(parts, options, strict=True)))
            short.append(sum(x * seconds for x, (_, _, seconds) in zip(parts, options, strict=True)))
        total = sum(len(group) * own for group, own in zip(self.groups, self.chunks, strict=True))
        self.solver.Add(total == problem.costs.chunk_count - 1 + self.share)
        turned, slowest = (self.solver.NumVar(0.0, infinity, name) for name in ("turned", "slowest"))
        for row in rows.turned(self.chunks):
            self.solver.Add(turned >= row)
        for row in rows.end(turned, self.chunks, whole, short):
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
