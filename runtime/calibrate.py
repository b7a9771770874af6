"""Time one layer's tile on the device at hand, as it runs in a step.

In a step a tile finds little of what it reads in the caches: since its last run other layers have been at work. And between two
programs the executor binds arguments, counts storages and drops values. So a tile is run by the executor itself, on a sequence of
one chunk, and before each run memory of the size of a cache is written over. What the action before would just have written
stays warm: the residual chunk, or its cotangent.

A busy machine disturbs timings, always upwards. The median of some runs counts while it is near the fastest of them; what is
not is said to be unsteady, and the caller measures again another time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.executable import Executable
from adjcomp.ir.plan import Certificate, Plan, Share, Status
from adjcomp.ir.program import TilePrograms
from adjcomp.ir.stack import InputKind, ResidualStack
from adjcomp.ir.values import Value, adjoint, carry, cotangent, stream
from adjcomp.runtime.backward import Backward
from adjcomp.runtime.executor import Step
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.sharded import is_sharded
from adjcomp.runtime.values import Cotangents, Held, StepInputs

LEAST_RUNS, MOST_RUNS = 5, 15
ENOUGH_SECONDS, FEW_RUNS = 2.0, 3  # of long tiles, fewer runs serve
STEADY_SHARE, STEADY_SECONDS = 0.1, 2e-4  # how far over the fastest run the median may be
EVICTED_BYTES = 32 << 20  # written over before each run on a CPU
EVICTED_BYTES_GPU = 256 << 20  # and on a GPU, whose largest caches hold as much
NO_BUDGET = 1 << 60  # bytes
Tensor = torch.Tensor


@dataclass(frozen=True)
class Timing:
    """Seconds of a run of a tile, and whether runs agreed."""

    seconds: float
    steady: bool


def time_tile(
    stack: ResidualStack,
    layer: int,
    costs: StackCosts,
    programs: Sequence[TilePrograms],
    state: Mapping[str, Tensor],
    before: int = 0,
) -> dict[str, Timing]:
    """Timings of "forward", "keeping" and "vjp" (where they exist) of a layer's tile.

    Floats are standard normal, integers zero. The layer's own parameters are read, nothing of the model is written.

    Args:
        layer: index in the stack.
        costs: of a sequence of one chunk of the length at which the tile is timed.
        programs: by template, at that length.
        state: parameters and buffers by name.
        before: steps of earlier chunks to which the tile attends.
    """
    rehearsal = Rehearsal(stack, layer, costs, programs, state, before)
    samples: dict[str, list[float]] = {}
    rehearsal.sample()  # compiles kernels, and takes memory from the system
    started = time.perf_counter()
    while True:
        for part, seconds in rehearsal.sample().items():
            samples.setdefault(part, []).append(seconds)
        timings, runs = {part: timing_of(found) for part, found in samples.items()}, len(samples["forward"])
        long = time.perf_counter() - started > ENOUGH_SECONDS and runs >= FEW_RUNS
        if long or runs >= MOST_RUNS or (runs >= LEAST_RUNS and all(t.steady for t in timings.values())):
            return timings


def timing_of(samples: Sequence[float]) -> Timing:
    """The median of some runs' seconds, or the most that it may be over the fastest, where it is further away."""
    fastest = min(samples)
    most = fastest + max(STEADY_SHARE * fastest, STEADY_SECONDS)
    median = statistics.median(samples)
    return Timing(min(median, most), median <= most)


class Rehearsal(Step):
    """A step of one layer on one chunk, whose actions can be run again and again."""

    def __init__(
        self,
        stack: ResidualStack,
        layer: int,
        costs: StackCosts,
        programs: Sequence[TilePrograms],
        state: Mapping[str, Tensor],
        before: int = 0,
    ) -> None:
        self.layer, self.costs, self.own = layer, costs, programs[stack.layers[layer].template]
        device = next(iter(state.values())).device
        actions = (Start(layer, layer), self._run_forward(True), Turn(layer, layer), self._run_vjp())
        certificate = Certificate({}, {}, 0.0, 0.0, Status.HEURISTIC, "", (costs.chunk,))
        plan = Plan(costs, (Share(str(device), NO_BUDGET, {}, {}),), certificate, actions)
        executable = Executable(stack, plan, tuple(programs), tuple(programs))
        super().__init__(executable, _inputs(stack, layer, costs.chunk, state), StorageTracker(0))
        self.tiles.before = before
        self.evicted = torch.zeros((EVICTED_BYTES if device.type == "cpu" else EVICTED_BYTES_GPU) // 4, device=device)
        self.before = self._before()
        self.tiles.values.update(self.before)
        if self.own.vjp is not None:
            self.reverse = Backward(self.tiles, self.outputs, self._cotangents(), frozenset({layer}))
            self.reverse.start(layer, layer)
            self.before = dict(self.tiles.values)

    @torch.no_grad()
    def sample(self) -> dict[str, float]:
        """Seconds of one run of each part."""
        seconds = {"forward": self._timed(self._run_forward(False), stream(self.layer - 1, 0))}
        if self.own.keeping is not None and self.own.vjp is not None:
            seconds["keeping"] = self._timed(self._run_forward(True), stream(self.layer - 1, 0))
            given = cotangent(self.costs.cotangent_of(self.layer), 0)
            if self.layer < self.costs.head:
                self.tiles.values[given] = [self.tiles.stream_zeros(self.layer, 0).add_(1.0)]
            seconds["vjp"] = self._timed(self._run_vjp(), given)
        self.tiles.values.clear()
        self.tiles.values.update(self.before)
        return seconds

    def _timed(self, action: Action, warm: Value) -> float:
        """Seconds of an action that finds only `warm` in the caches."""
        self.evicted.add_(1.0)
        for tensor in self.tiles.values.get(warm, []):
            if tensor is not None:
                tensor.copy_(tensor.clone())
        started = self._now()
        self._run(action)
        return self._now() - started

    def _now(self) -> float:
        if self.tiles.device.type == "cuda":
            torch.cuda.synchronize(self.tiles.device)
        return time.perf_counter()

    def _run_forward(self, keep: bool) -> Action:
        frees = [carry(self.layer, 0)]
        if not (keep and self.own.reads_outputs):
            frees.append(stream(self.layer, 0))
        if self.layer == self.costs.head:
            return Loss(0, keep, frees=tuple(frees))
        return Forward(self.layer, 0, keep, frees=tuple(frees))

    def _run_vjp(self) -> Action:
        made = (cotangent(self.layer - 1, 0), adjoint(self.layer, -1), stream(self.layer, 0))
        return HeadVjp(0, frees=made) if self.layer == self.costs.head else Adjoint(self.layer, 0, frees=made)

    def _before(self) -> dict[Value, Held]:
        """What the tile finds: the residual chunk and the state before it."""
        layer, template = self.tiles.layer(self.layer)
        found: dict[Value, Held] = {}
        for value, entry in zip(_placeholders(self.executable.stack, self.layer), template.inputs, strict=True):
            if entry.kind is InputKind.STREAM:
                found[stream(self.layer - 1, 0)] = [_example(value, self.costs.chunk)]
        self.tiles.keep_stores(self.layer)
        for store in self.tiles.stores[self.layer]:
            store.normal_(generator=_generator(store.device))
        if layer.carries:
            found[carry(self.layer, -1)] = [self.tiles.zeros(info.shape, info.dtype) for info in layer.carries]
        return found

    def _cotangents(self) -> Cotangents:
        """Ones for everything; of a per-token output that other tiles make, whatever is in its memory."""
        own = self.executable.stack.layers[self.layer].outs
        outs = [whole.fill_(1.0) if i in own else whole for i, whole in enumerate(self.outputs.outs)]
        return Cotangents([torch.ones_like(total) for total in self.outputs.sums], outs, [None] * len(self.outputs.finals))


def _inputs(stack: ResidualStack, layer: int, length: int, state: Mapping[str, Tensor]) -> StepInputs:
    """The layer's parameters, and sides of one chunk."""
    bound = stack.layers[layer]
    device = next(iter(state.values())).device
    sides = [torch.empty(0, device=device) for _ in stack.sides]
    for value, entry in zip(_placeholders(stack, layer), stack.templates[bound.template].inputs, strict=True):
        if entry.kind is InputKind.SIDE:
            sides[bound.sides[entry.index]] = _example(value, length)
    return StepInputs({name: _parameter(state[name]) for name in bound.parameters}, sides, [], 0)


def _placeholders(stack: ResidualStack, layer: int) -> list[Tensor]:
    """Fake values of a tile's inputs."""
    template = stack.templates[stack.layers[layer].template]
    return [node.meta["val"] for node in template.graph.graph.nodes if node.op == "placeholder"]


def _parameter(parameter: Tensor) -> Tensor:
    """A parameter, or another tensor of its shape where the whole of it isn't here."""
    here = not is_sharded(parameter) and (parameter.numel() < 2 or 0 not in parameter.stride())
    return parameter.detach() if here else _example(parameter, 0)


def _example(value: Tensor, length: int) -> Tensor:
    shape = [size if isinstance(size, int) else length for size in value.shape]
    if value.is_floating_point() or value.is_complex():
        return torch.randn(shape, dtype=value.dtype, device=value.device, generator=_generator(value.device))
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _generator(device: torch.device) -> torch.Generator:
    """Numbers of our own: calibration must not move the user's generator."""
    return torch.Generator(device=device).manual_seed(0)
