"""One step of a compiled model: what is counted, what is drawn, what is watched, and its passage through autograd."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from adjcomp.attempts import Attempts
from adjcomp.bridge import Bridge, Call
from adjcomp.budget import Held
from adjcomp.ir.executable import Executable
from adjcomp.ir.stack import InputKind
from adjcomp.mesh.spread import Spread
from adjcomp.optimizers import live_bytes
from adjcomp.runtime.executor import Step
from adjcomp.runtime.memory import StorageTracker, distinct_bytes
from adjcomp.runtime.mesh.link import Traffic
from adjcomp.runtime.recording import Recordings
from adjcomp.runtime.values import StepInputs

Tensor = torch.Tensor


@dataclass(frozen=True)
class Stats:
    """Figures of the last step on this rank's device. Bytes count everything live there; seconds are wall clock, both passes
    together.

    adjoint_norms: (layers with a state, chunks) float32, the norm of the adjoint state at the border before each chunk: how far
    gradients reach back. None unless `Options(adjoint_norms=True)` asked for them and a backward has run.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    seconds: float
    adjoint_norms: Tensor | None = None
    sent_bytes: int = 0  # values of the plan that this rank has handed to others
    summed_bytes: int = 0  # gradients that it has given to sums over ranks
    replayed_tiles: int = 0  # runs of tiles' programs that were replays of CUDA graphs


@dataclass(frozen=True)
class StepRequest:
    """Everything one step needs.

    state: parameters and buffers by name. watched: tensors that must not change before the backward, by the name an error gives
        them.
    tensors: the call's own. sides, initial: from the prologue. smaller: the executable under an effective budget in bytes, for a
        device that runs out of memory. recordings: tiles recorded by earlier steps.
    """

    executable: Executable
    state: Mapping[str, Tensor]
    watched: Mapping[str, Tensor]
    tensors: tuple[Tensor, ...]
    sides: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]
    held: Held
    optimizer: torch.optim.Optimizer | str | None
    spread: Spread | None
    smaller: Callable[[int], Executable]
    adjoint_norms: bool
    recordings: Recordings | None
    deterministic: bool


def run_step(request: StepRequest, record: Callable[[Stats], None]) -> tuple[Tensor, ...]:
    """The forward under the plan; its results (sums, per-token outputs, final states) lead autograd to the backward."""
    executable, state = request.executable, request.state
    held_bytes = sum(request.held.resident_bytes().values()) - request.held.optimizer_bytes
    seed = int(torch.randint(2**62, ())) if _draws(executable) else 0
    inputs = StepInputs(dict(state), request.sides, request.initial, seed, request.adjoint_norms, request.deterministic)

    def make(executable: Executable) -> Step:
        recorded = 0 if executable.recorded is None else executable.recorded.total_bytes
        tracker = StorageTracker(held_bytes + live_bytes(request.optimizer) + recorded)
        if request.recordings is not None:
            request.recordings.begin(executable)
        tracker.track_all(made_by_prologue(request.sides, request.tensors))
        exchange = None if request.spread is None else request.spread.begin(executable, seed, tracker, state)
        whole = inputs if exchange is None else replace(inputs, state=exchange.gather(state))
        return Step(executable, whole, tracker, exchange, request.recordings)

    step = Attempts(executable, make, request.smaller)
    names = [n for n, t in state.items() if t.requires_grad and n in _used(executable)]
    sides = [i for i, s in enumerate(request.sides) if s.requires_grad]
    initial = [i for i, s in enumerate(request.initial) if s.requires_grad]
    leaves = [*(state[n] for n in names), *(request.sides[i] for i in sides), *(request.initial[i] for i in initial)]
    timer = _Timer(step, record)
    call = Call(step, names, sides, initial, _versions(request), timer.backward)
    bridge: Any = Bridge.apply
    results: tuple[Tensor, ...] = timer.forward(lambda: bridge(call, *leaves))
    if not any(r.requires_grad for r in results):
        step.forget()
    return results


class _Timer:
    """Records the figures of a step after its forward and again after its backward, and lets go of it then."""

    def __init__(self, step: Attempts, record: Callable[[Stats], None]) -> None:
        self.step: Attempts | None = step
        self.record = record
        self.forward_seconds = 0.0

    def forward(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        started = time.perf_counter()
        results = run()
        self.forward_seconds = time.perf_counter() - started
        if self.step is not None:
            self.record(_figures(self.step.step, self.forward_seconds))
        return results

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        started = time.perf_counter()
        step, self.step = self.step, None
        yield
        if step is not None:
            self.record(_figures(step.step, self.forward_seconds + time.perf_counter() - started))


def _figures(step: Step, seconds: float) -> Stats:
    share = step.executable.plan.shares[0 if step.exchange is None else step.exchange.part.device]
    traffic = Traffic() if step.exchange is None else step.exchange.link.traffic
    return Stats(
        budget_bytes=share.budget_bytes,
        predicted_peak_bytes=step.executable.plan.peak_bytes[share.name],
        measured_peak_bytes=step.tracker.peak_bytes,
        seconds=seconds,
        adjoint_norms=step.adjoint_norms,
        sent_bytes=traffic.sent,
        summed_bytes=traffic.summed,
        replayed_tiles=step.tiles.replays,
    )


def _versions(request: StepRequest) -> dict[str, tuple[Tensor, int]]:
    """What the backward reads again: the inputs, and every parameter or buffer that a tile uses and the forward doesn't write.

    Nothing where there will be no backward: tensors made in inference mode count no versions.
    """
    if not torch.is_grad_enabled():
        return {}
    stack = request.executable.stack
    read = _used(request.executable) | (request.watched.keys() - request.state.keys())
    return {name: (t, t._version) for name, t in request.watched.items() if name in read and name not in stack.updates}


def made_by_prologue(sides: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The sides with storage of their own, each storage once."""
    known = {t.untyped_storage().data_ptr() for t in tensors}
    found: dict[int, Tensor] = {}
    for side in sides:
        pointer = side.untyped_storage().data_ptr()
        if pointer not in known:
            found.setdefault(pointer, side)
    return list(found.values())


def made_bytes(sides: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> int:
    """Bytes of `made_by_prologue`."""
    return distinct_bytes(made_by_prologue(sides, tensors))


def _used(executable: Executable) -> frozenset[str]:
    return frozenset(name for layer in executable.stack.layers for name in layer.parameters)


def _draws(executable: Executable) -> bool:
    return any(entry.kind is InputKind.SEED for template in executable.stack.templates for entry in template.inputs)
