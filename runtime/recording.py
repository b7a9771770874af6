"""Tiles that are recorded once and replayed: one launch instead of one for every kernel.

A program runs as it is the first time (kernels are compiled, libraries wake up), is recorded for a layer the second time, and is
replayed from then on. A recording is bound to addresses: those of the layer's parameters and gradient accumulators are part of
its key, and where they have moved it is made anew. All other inputs are copied to places that all recordings share, all results
are copied from where the recording leaves them, except those that the caller reads before anything else runs. So nothing that a
plan calls live is ever in a place that another replay writes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from adjcomp.ir.executable import Executable
from adjcomp.ir.program import Program
from adjcomp.ir.recording import ALIGNMENT, RecordedPrograms, place_bytes
from adjcomp.runtime.codegen import compiled
from adjcomp.runtime.kernels.determinism import is_fixed
from adjcomp.runtime.memory import StorageTracker

log = logging.getLogger("adjcomp")
Tensor = torch.Tensor
Results = Sequence[Tensor | None]
FEWEST_REPLAYS = 2  # a recording that is replayed less often before its addresses change gains nothing
MOST_STRIKES = 3  # times that this may happen to a layer's recordings of a program before they are given up


class RecordingError(RuntimeError):
    """A program does something that can't be recorded, such as waiting for the device."""


class Recording(ABC):
    """Work on fixed addresses."""

    @abstractmethod
    def replay(self) -> Results:
        """Do the work again. The results are the same tensors each time; what they hold is good until any other replay."""


class Recorder(ABC):
    """How a device records. `record` raises RecordingError for what it can't."""

    @abstractmethod
    def start_over(self) -> None:
        """Called when no recording is left: give back what they took."""

    @abstractmethod
    def prepare(self) -> None:
        """Called before the places of recordings are written: waits for what other streams still do with them."""

    @abstractmethod
    def record(self, run: Callable[[], Results]) -> Recording:
        """Note what `run` does on the device, without doing it."""


@dataclass
class _Recorded:
    """A recording, the addresses that it is bound to, and the places of its other inputs."""

    addresses: tuple[object, ...]
    places: list[Tensor]
    recording: Recording
    replays: int = 0


@dataclass
class Call:
    """One run of a program. fixed: which arguments are parameters. passing: results that the caller reads at once."""

    program: Program
    layer: int
    arguments: list[Tensor]
    fixed: Sequence[bool]
    gradients: list[Tensor | None]
    passing: frozenset[int] = frozenset()


@dataclass
class Recordings:
    """The recordings of one executable's programs, kept from step to step; another executable's take their place."""

    recorder: Recorder
    device: torch.device
    wanted: RecordedPrograms | None = None
    _owner: object = None
    _takes: frozenset[int] = frozenset()
    _arena: Tensor | None = None
    _warm: set[int] = field(default_factory=set)
    _known: dict[tuple[int, int], _Recorded] = field(default_factory=dict)
    _strikes: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin(self, executable: Executable) -> None:
        """Serve an executable from now on; what was recorded for other programs is dropped."""
        if executable.programs is self._owner and executable.recorded is not None:
            return
        if self._known:
            self._known.clear()
            self.recorder.start_over()
        self._warm.clear()
        self._strikes.clear()
        self._arena = None
        self._owner, self.wanted = executable.programs, executable.recorded
        self._takes = frozenset() if self.wanted is None else frozenset(map(id, self.wanted.programs))

    def takes(self, executable: Executable, program: Program) -> bool:
        """Whether a program of an executable may be recorded."""
        return id(program) in self._takes and executable.programs is self._owner

    def run(self, call: Call, tracker: StorageTracker) -> Results | None:
        """The results of a replay, for which `call.arguments` is emptied; None where the program has to run as it is."""
        if id(call.program) not in self._warm:
            self._warm.add(id(call.program))
            return None
        key = id(call.program), call.layer
        addresses = _addresses(call)
        known = self._known.get(key)
        if known is None or known.addresses != addresses:
            if known is not None and self._gives_up(key, known):
                return None
            known = self._record(key, call, addresses)
            if known is None:
                return None
        self.recorder.prepare()
        _copy(known.places, _moving(call))
        call.arguments.clear()
        results = _copies(known.recording.replay(), call.passing, tracker)
        known.replays += 1
        return results

    def _gives_up(self, key: tuple[int, int], known: _Recorded) -> bool:
        """Whether the addresses change too often for this layer's program to be worth recording."""
        strikes = self._strikes.get(key, 0) + (known.replays < FEWEST_REPLAYS)
        self._strikes[key] = strikes
        return strikes >= MOST_STRIKES

    def _record(self, key: tuple[int, int], call: Call, addresses: tuple[object, ...]) -> _Recorded | None:
        self._known.pop(key, None)
        try:
            places, recording = self._recording(call)
        except RecordingError as error:
            log.info("%s of layer %d is not recorded: %s", call.program.name, call.layer, error)
            self._takes -= {id(call.program)}
            return None
        self._known[key] = made = _Recorded(addresses, places, recording)
        return made

    def _recording(self, call: Call) -> tuple[list[Tensor], Recording]:
        """The places of a program's inputs, and the program recorded on them, in no more bytes than were counted."""
        assert self.wanted is not None
        moving, tracker = _moving(call), StorageTracker(0)
        _check(place_bytes(t.numel() * t.element_size() for t in moving), self.wanted.input_bytes)
        places = self._places(moving)
        rest = iter(places)
        inputs = [t if fixed else next(rest) for t, fixed in zip(call.arguments, call.fixed, strict=True)]
        run, gradients = compiled(call.program, self.device), call.gradients
        recording = self.recorder.record(lambda: run(list(inputs), gradients, tracker))
        _check(tracker.peak_bytes, self.wanted.pool_bytes)
        return places, recording

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Parts of the arena for tensors of these shapes, dense, one after the other."""
        assert self.wanted is not None
        if self._arena is None:
            self._arena = torch.empty(self.wanted.input_bytes, dtype=torch.uint8, device=self.device)
        places, start = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            places.append(self._arena[start : start + size].view(tensor.dtype).view(tensor.shape))
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return places


def _check(needed: int, counted: int) -> None:
    if needed > counted:
        raise RecordingError(f"it takes {needed} bytes where the plan counts {counted}")


def _moving(call: Call) -> list[Tensor]:
    """The arguments that are copied."""
    return [t for t, fixed in zip(call.arguments, call.fixed, strict=True) if not fixed]


def _addresses(call: Call) -> tuple[object, ...]:
    """What a recording is bound to: parameters, accumulators, and settings that choose other kernels."""
    parameters = [t.data_ptr() for t, fixed in zip(call.arguments, call.fixed, strict=True) if fixed]
    accumulators = [None if t is None else t.data_ptr() for t in call.gradients]
    settings = (is_fixed(), torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32)
    return (*parameters, *accumulators, *settings)


def _copy(places: list[Tensor], sources: list[Tensor]) -> None:
    """All at once."""
    if places:
        torch._foreach_copy_(places, sources)


def _copies(results: Results, passing: frozenset[int], tracker: StorageTracker) -> Results:
    """Results in storage of their own (those in `passing` as they are); a result that comes twice stays one tensor."""
    made: dict[int, Tensor] = {}
    sources = []
    for i, result in enumerate(results):
        if result is not None and i not in passing and id(result) not in made:
            made[id(result)] = torch.empty_like(result)
            sources.append(result)
    tracker.track_all(made.values())
    _copy(list(made.values()), sources)
    return [None if r is None else made.get(id(r), r) for r in results]
