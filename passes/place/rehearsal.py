"""A pipeline by layers, timed and weighed piece by piece: what its actions would take, without writing them.

A piece is one chunk's forward, wave or adjoints in one stage. Within a piece nothing waits but for what comes in at its start,
so the time of a whole plan is that of its pieces, up to what computations wait for values that leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from adjcomp.ir.costs import TileCost
from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.place.problem import Problem, internals
from adjcomp.passes.place.wave import Station, pieces_of, reached


@dataclass(frozen=True)
class _Lengths:
    """Seconds of the pieces of one chunk in one stage."""

    forward: float
    again: float  # the wave, or the recomputation just before the adjoints
    adjoints: float  # with the second runs of tiles


def rehearsed(problem: Problem, stations: Sequence[Station]) -> float:
    """Seconds until the last stage is done; infinite where stages would wait for each other in a circle."""
    run = _Rehearsal(problem, stations)
    run.forward()
    return run.backward()


def most_kept(problem: Problem, station: Station, wave: Sequence[bool]) -> int:
    """Most bytes of internals, and of inputs that the wave doesn't bring again, that a station has at a time."""
    costs, first = problem.costs, station.first
    modes = dict(zip(station.chunks, station.modes, strict=True))
    comes = dict(zip(station.chunks, wave, strict=True))
    below = costs.layers[first - 1].stream_bytes if first > 0 else 0
    sizes = {mode: _kept_bytes(problem, station, mode) for mode in set(modes.values())}
    stays = {c: sizes[m][0] + (0 if comes[c] or sizes[m][1] == 0 else below) for c, m in modes.items()}
    live = peak = sum(stays.values())
    for is_wave, chunk in pieces_of(station, wave, problem.bottom):
        if is_wave:
            live += sizes[modes[chunk]][1]
            peak = max(peak, live)
        else:
            more = 0 if comes[chunk] else sizes[modes[chunk]][1]
            peak = max(peak, live + more)
            live -= stays[chunk] + sizes[modes[chunk]][1] - more
    return peak


def _kept_bytes(problem: Problem, station: Station, mode: ColumnMode) -> tuple[int, int]:
    """Bytes of a chunk that stay from the forward on, and those that its recomputation leaves."""
    layers, top = problem.costs.layers, station.last - mode.held
    held = sum(internals(problem.costs, k) for k in range(max(top + 1, problem.bottom), station.last + 1))
    made = sum(
        (layers[k - 1].stream_bytes if k > 0 else 0) if k in mode.again else internals(problem.costs, k)
        for k in range(station.first, top + 1)
    )
    return held, made


@dataclass
class _Transfer:
    """A value on its way from one stage to the next or the one before."""

    offered: float | None = None  # when it was there to be sent
    room: float | None = None  # when there was room for it
    end: float | None = None


class _Rehearsal:
    """One run through a pipeline. Lists are by stage.

    As the actions are written (`adjcomp.passes.place.wave`), room for what a piece reads is made as the piece before it begins,
    and what a piece has sent is dropped after the next one, which waits for that.
    """

    def __init__(self, problem: Problem, stations: Sequence[Station]) -> None:
        self.problem, self.stations = problem, stations
        waves = reached(problem.bottom, stations)
        self.waves = [dict(zip(s.chunks, w, strict=True)) for s, w in zip(stations, waves, strict=True)]
        self.rows = [pieces_of(s, w, problem.bottom) for s, w in zip(stations, waves, strict=True)]
        self.lengths = [_lengths(problem, station) for station in stations]
        pairs = list(pairwise(stations))
        layers, wiring = problem.costs.layers, problem.wiring
        self.up = [wiring.seconds(a.device, b.device, layers[a.last].stream_bytes) for a, b in pairs]
        self.down = [wiring.seconds(b.device, a.device, layers[a.last].cotangent_bytes) for a, b in pairs]
        self.free = [0.0 for _ in stations]
        self.place = [0 for _ in stations]  # of the next piece
        self.dropping = [False for _ in stations]  # a piece is done but for what the one before it has sent
        self.sent: list[tuple[list[_Transfer], list[_Transfer]]] = [([], []) for _ in stations]  # by the last piece, and before
        self.moving: dict[tuple[int, bool, int], _Transfer] = {}  # by the stage that reads it, whether it is x, and chunk
        self.ways: dict[tuple[int, bool], float] = {}

    def forward(self) -> None:
        """All chunks upwards."""
        come = dict.fromkeys(self.stations[0].chunks, 0.0)
        for s, station in enumerate(self.stations):
            now = way = 0.0
            for chunk in station.chunks:
                now = max(now, come[chunk]) + self.lengths[s][chunk].forward
                if s + 1 < len(self.stations):
                    way = come[chunk] = max(way, now) + self.up[s]
            self.free[s] = now

    def backward(self) -> float:
        """The wave and the adjoints; seconds until the last stage is done, infinite where stages wait for each other."""
        for s in range(len(self.stations)):
            self._room(s, 0)
        while any(place < len(row) for place, row in zip(self.place, self.rows, strict=True)):
            before = list(zip(self.place, self.dropping, strict=True))
            for s, row in enumerate(self.rows):
                while self.place[s] < len(row) and (self.dropping[s] or self._ran(s)) and self._dropped(s):
                    self.place[s] += 1
            if before == list(zip(self.place, self.dropping, strict=True)):
                return math.inf
        return max(self.free)

    def _reads(self, s: int, place: int) -> list[_Transfer]:
        """What the piece at `place` gets from other stages."""
        if place >= len(self.rows[s]):
            return []
        is_wave, chunk = self.rows[s][place]
        top, found = s + 1 == len(self.stations), []
        if s > 0 and self.waves[s][chunk] and (is_wave or top):
            found.append(self.moving.setdefault((s, True, chunk), _Transfer()))
        if not is_wave and not top:
            found.append(self.moving.setdefault((s, False, chunk), _Transfer()))
        return found

    def _room(self, s: int, place: int) -> None:
        """Make room for what the piece at `place` reads."""
        for one in self._reads(s, place):
            if one.room is None:
                one.room = self.free[s]
                self._move(one, s, stream=self.rows[s][place][0] or s + 1 == len(self.stations))

    def _move(self, one: _Transfer, reader: int, *, stream: bool) -> None:
        """Start a transfer that both sides are ready for."""
        if one.offered is not None and one.room is not None:
            key = (reader, stream)
            seconds = self.up[reader - 1] if stream else self.down[reader]
            one.end = self.ways[key] = max(one.offered, one.room, self.ways.get(key, 0.0)) + seconds

    def _ran(self, s: int) -> bool:
        """Run the next piece of a stage; False where what it reads isn't on its way yet."""
        is_wave, chunk = self.rows[s][self.place[s]]
        self._room(s, self.place[s] + 1)
        come = [one.end for one in self._reads(s, self.place[s])]
        if any(end is None for end in come):
            return False
        top, lengths = s + 1 == len(self.stations), self.lengths[s][chunk]
        there = max((end for end in come if end is not None), default=0.0)
        alone = 0.0 if is_wave or top or self.waves[s][chunk] else lengths.again  # recomputed while the cotangent comes
        now = max(self.free[s] + alone, there) + (lengths.again if top or is_wave else 0.0)
        self.free[s] = now + (0.0 if is_wave else lengths.adjoints)
        if is_wave and not top and self.waves[s + 1][chunk]:
            self._send(s, s + 1, chunk, stream=True)
        if not is_wave and s > 0 and self.stations[s - 1].last >= self.problem.bottom:
            self._send(s, s - 1, chunk, stream=False)
        self.dropping[s] = True
        return True

    def _send(self, s: int, reader: int, chunk: int, *, stream: bool) -> None:
        """Offer a value to another stage."""
        one = self.moving.setdefault((reader, stream, chunk), _Transfer())
        one.offered = self.free[s]
        self.sent[s][0].append(one)
        self._move(one, reader, stream=stream)

    def _dropped(self, s: int) -> bool:
        """Drop what the piece before the last has sent; False where that has no room yet."""
        last, before = self.sent[s]
        if any(one.end is None for one in before):
            return False
        self.free[s] = max(self.free[s], *(one.end or 0.0 for one in before), 0.0)
        self.sent[s], self.dropping[s] = ([], last), False
        return True


def _lengths(problem: Problem, station: Station) -> dict[int, _Lengths]:
    """Seconds of the pieces of every chunk of a station."""
    costs = problem.costs
    speed, last = problem.sites[station.device].speed, costs.chunk_count - 1
    known: dict[tuple[ColumnMode, bool], _Lengths] = {}
    found = {}
    for chunk, mode in zip(station.chunks, station.modes, strict=True):
        key = (mode, chunk == last)
        if key not in known:
            layers = costs.last_layers if chunk == last else costs.layers
            known[key] = _lengths_of(layers, station, mode, problem.bottom, speed)
        found[chunk] = known[key]
    return found


def _lengths_of(layers: Sequence[TileCost], station: Station, mode: ColumnMode, bottom: int, speed: float) -> _Lengths:
    """Seconds of the pieces of a chunk under a mode."""
    top, own = station.last - mode.held, range(station.first, station.last + 1)
    forward = sum(layers[k].keep_seconds if k > top and k >= bottom else layers[k].forward_seconds for k in own)
    again = sum(layers[k].forward_seconds if k < bottom or k in mode.again else layers[k].keep_seconds for k in own if k <= top)
    adjoints = sum(layers[k].adjoint_seconds for k in own if layers[k].has_vjp)
    adjoints += sum(layers[k].keep_seconds for k in mode.again if k <= top)
    return _Lengths(forward / speed, again / speed, adjoints / speed)
