"""The actions of a pipeline: every stage in its own order, from stages to lists of actions.

Forward: chunk by chunk, x is handed up. Backward: a stage alternates between the wave (recomputing a chunk, from the x that the
stage below sends again, and sending its own x on) and the adjoints of the chunk whose cotangent has come down. Room for what
comes in is made one piece of work ahead, and what goes out is dropped one piece of work later, so that transfers overlap with
computation.

In a grid every stage has several lanes, which take its chunks in turn. A lane is a pipeline of its own over its chunks; besides,
each layer's state goes on to the next lane as soon as it is made, and its adjoint state to the lane before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Forward, Free, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Value, adjoint, carry, cotangent, has_adjoint, has_carry, stream
from adjcomp.passes.emit import vjp
from adjcomp.passes.lifetimes import drop_after_last_use, on_device


@dataclass(frozen=True)
class Station:
    """A stage as it runs: which tiles it holds or recomputes, chunk by chunk, and who its neighbours are."""

    device: int
    first: int
    last: int
    lag: int  # chunks that the wave runs ahead of the adjoints
    chunks: range  # its own, first to last
    modes: tuple[ColumnMode, ...]  # of its chunks; `held` counts tiles from `last` down
    below: int | None  # device of the stage below
    above: int | None  # device of the stage above
    before: int | None = None  # device of the lane that has the chunk before each of these
    after: int | None = None  # device of the lane that has the chunk after
    sums: tuple[tuple[int, int], ...] = ()  # layers whose gradients are added up over lanes, and their bytes


def reached(bottom: int, stations: Sequence[Station]) -> list[tuple[bool, ...]]:
    """For each station of a lane and its chunks whether the wave of recomputation comes by, lowest station first.

    It does where the station doesn't hold the chunk whole and the wave comes by in the station below. A chunk that isn't held
    and that it doesn't reach keeps its x from below. Layers without VJP are passed only for the sake of the station above them.
    """
    found: list[tuple[bool, ...]] = []
    came = _wanted(bottom, stations)
    for station in stations:
        size = station.last + 1 - max(station.first, bottom)
        if size > 0:
            came = tuple(here and mode.held < size for here, mode in zip(came, station.modes, strict=True))
        found.append(came)
    return found


def _wanted(bottom: int, stations: Sequence[Station]) -> tuple[bool, ...]:
    """Which chunks the lowest station with a VJP doesn't hold whole."""
    lowest = next(station for station in stations if station.last >= bottom)
    size = lowest.last + 1 - max(lowest.first, bottom)
    return tuple(mode.held < size for mode in lowest.modes)


def pieces_of(station: Station, wave: Sequence[bool], bottom: int) -> list[tuple[bool, int]]:
    """(whether it is the wave, chunk) in the order of a station's backward; `wave` says for its chunks whether that comes by."""
    ahead = [] if station.above is None else [c for c, comes in zip(station.chunks, wave, strict=True) if comes]
    pieces = []
    for chunk in reversed(station.chunks):
        while ahead and ahead[-1] >= chunk - station.lag * station.chunks.step:
            pieces.append((True, ahead.pop()))
        if station.last >= bottom:
            pieces.append((False, chunk))
    return pieces


def station_actions(costs: StackCosts, bottom: int, stations: Sequence[Station], index: int) -> tuple[Action, ...]:
    """The actions of station `index` in its order, with what each drops."""
    waves = reached(bottom, stations)
    nowhere = (False,) * len(stations[index].modes)
    above = waves[index + 1] if index + 1 < len(stations) else nowhere
    writer = _Writer(costs, bottom, stations[index], waves[index], above)
    writer.forward()
    writer.backward()
    return drop_after_last_use(costs, writer.actions, writer.waits)


class _Writer:
    """Writes the actions of one station."""

    def __init__(self, costs: StackCosts, bottom: int, station: Station, wave: Sequence[bool], above: Sequence[bool]) -> None:
        self.costs, self.bottom, self.station = costs, bottom, station
        # Whether the wave comes by here and in the station above, by chunk.
        self.wave, self.above = (dict(zip(station.chunks, flags, strict=True)) for flags in (wave, above))
        self.modes = dict(zip(station.chunks, station.modes, strict=True))
        self.on_top = station.above is None  # here the wave turns: a chunk's held tiles have their VJPs before it comes by
        self.actions: list[Action] = []
        self.waits: dict[int, list[Value]] = {}
        self.sent: list[Value] = []  # on their way since the piece of work before
        self.sending: list[Value] = []  # sent by the piece of work at hand

    def forward(self) -> None:
        """All chunks, first to last."""
        station, chunks = self.station, self.station.chunks
        self._do(Start(*self._own(chunks[0] == 0)))
        self._room_forward(0)
        for place, chunk in enumerate(chunks):
            self._room_forward(place + 1)
            for layer in range(station.first, station.last + 1):
                held = layer > station.last - self.modes[chunk].held and layer >= self.bottom
                if layer == self.costs.head:
                    self._do(Loss(chunk, held, device=station.device))
                else:
                    self._do(Forward(layer, chunk, held, device=station.device))
                if station.after is not None and chunk + 1 < self.costs.chunk_count and has_carry(self.costs.tile(layer, chunk)):
                    self._send(carry(layer, chunk), station.after)
            self._hand_up(chunk)
            self._drop_sent()
        self._do(Turn(*self._own(chunks[-1] == self.costs.chunk_count - 1)))
        self._drop_sent()

    def backward(self) -> None:
        """The wave and the adjoints in turns, then the gradients."""
        pieces = pieces_of(self.station, tuple(self.wave.values()), self.bottom)
        self._room(pieces[0] if pieces else None)
        for index, piece in enumerate(pieces):
            self._room(pieces[index + 1] if index + 1 < len(pieces) else None)
            is_wave, chunk = piece
            if is_wave:
                self._recompute(chunk)
                if self.above[chunk]:
                    self._hand_up(chunk)
            else:
                self._adjoints(chunk)
            self._drop_sent()
        self._finish()

    def _finish(self) -> None:
        """Add gradients up and hand them out."""
        own = range(max(self.station.first, self.bottom), self.station.last + 1)
        for layer, size in self.station.sums:
            self._do(Sum(layer, size))
        for index, tie in enumerate(self.costs.ties):
            if 0 < sum(layer in own for layer in tie.layers) < len(tie.layers):
                self._do(SumTied(index))
        for layer in reversed(own):
            self._do(Publish(layer))
        self._drop_sent()
        self._drop_sent()

    def _own(self, wanted: bool) -> tuple[int, int]:
        """First and last layer of the station, or of none."""
        return (self.station.first, self.station.last) if wanted else (self.station.first, self.station.first - 1)

    def _room(self, piece: tuple[bool, int] | None) -> None:
        """Make room for what a piece of work reads from another device."""
        if piece is None:
            return
        is_wave, chunk = piece
        if is_wave or (self.on_top and self.wave[chunk]):
            self._room_for_stream(chunk)
        if is_wave:
            return
        if self.station.above is not None:
            value = cotangent(self.costs.cotangent_of(self.station.last), chunk)
            self._do(Receive(value, self.station.above, device=self.station.device, stream=1))
        if self.station.after is not None and chunk + 1 < self.costs.chunk_count:
            for layer in range(self.station.last, self.station.first - 1, -1):
                if has_adjoint(self.costs.tile(layer, chunk)):
                    self._do(Receive(adjoint(layer, chunk), self.station.after, device=self.station.device, stream=1))

    def _room_forward(self, place: int) -> None:
        """Make room for what the forward of the chunk at `place`, if there is one, gets from other devices."""
        station = self.station
        if place >= len(station.chunks):
            return
        chunk = station.chunks[place]
        self._room_for_stream(chunk)
        if station.before is not None and chunk > 0:
            for layer in range(station.first, station.last + 1):
                if has_carry(self.costs.tile(layer, chunk - 1)):
                    self._do(Receive(carry(layer, chunk - 1), station.before, device=self.station.device, stream=1))

    def _room_for_stream(self, chunk: int) -> None:
        """Make room for x from the stage below."""
        if self.station.below is not None:
            value = stream(self.station.first - 1, chunk)
            self._do(Receive(value, self.station.below, device=self.station.device, stream=1))

    def _recompute(self, chunk: int) -> None:
        """Run the tiles of a chunk again that its mode doesn't hold."""
        mode, station = self.modes[chunk], self.station
        top = station.last - mode.held
        for layer in range(station.first, top + 1):
            keep = layer >= self.bottom and layer not in mode.again
            self._do(Recompute(layer, chunk, keep, device=station.device))

    def _adjoints(self, chunk: int) -> None:
        """The VJPs of a chunk; tiles that wait for a second run get it now, and a chunk that the wave doesn't reach its first."""
        mode, station = self.modes[chunk], self.station
        top = station.last - mode.held
        hands_down = station.below is not None and self.costs.tile(station.first, chunk).passes_cotangent
        shared = self.costs.shares_cotangent
        for layer in range(station.last, max(station.first, self.bottom) - 1, -1):
            if layer == top and (self.on_top or not self.wave[chunk]):
                self._recompute(chunk)
            if layer in mode.again and layer <= top:
                self._do(Recompute(layer, chunk, True, device=station.device))
            self._do(vjp(self.costs, layer, chunk))
            if station.before is not None and chunk > 0 and has_adjoint(self.costs.tile(layer, chunk)):
                self._send(adjoint(layer, chunk - 1), station.before)
            if hands_down and shared and layer == station.last:  # no layer changes it: those below needn't wait for this station
                self._send(cotangent(self.costs.head - 1, chunk), station.below)  # type: ignore[arg-type]
        if hands_down and not shared:
            self._send(cotangent(station.first - 1, chunk), station.below)  # type: ignore[arg-type]

    def _hand_up(self, chunk: int) -> None:
        if self.station.above is not None:
            self._send(stream(self.station.last, chunk), self.station.above)

    def _send(self, value: Value, to: int) -> None:
        self._do(Send(value, to, device=self.station.device, stream=1))
        self.sending.append(value)

    def _drop_sent(self) -> None:
        """Drop what the piece of work before the last one has sent."""
        if self.sent:
            self.waits[len(self.actions)] = self.sent
            self._do(Free(device=self.station.device))
        self.sent, self.sending = self.sending, []

    def _do(self, action: Action) -> None:
        self.actions.append(on_device(action, self.station.device))
