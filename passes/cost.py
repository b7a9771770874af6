"""Costs of a stack's tiles at one chunk length: exact bytes from the programs, seconds from a cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from adjcomp.ir.costs import Gradient, JoinCost, StackCosts, Tie, TileCost
from adjcomp.ir.joining import JoinPrograms
from adjcomp.ir.program import Program, TilePrograms, Work
from adjcomp.ir.recording import RESIDENT_KIND, RecordedPrograms, RecordingPolicy
from adjcomp.ir.stack import InputKind, OutputKind, ResidualStack, Template, narrow_dtype
from adjcomp.ir.variant import Coupling
from adjcomp.machine import Device
from adjcomp.passes.joincosts import join_cost
from adjcomp.passes.joining import JoinGraphs, join_programs
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.recording import recorded_programs
from adjcomp.passes.sizes import number_of_bytes
from adjcomp.passes.split import KeepPolicy, Split

FEWEST_RANGES = 3  # two have nothing to join: the first hands its state on


@dataclass(frozen=True)
class Rates:
    """Linear cost model of a device: seconds = flops / f + updates / u + bytes / b + kernels · o."""

    flops_per_second: float
    updates_per_second: float
    bytes_per_second: float
    kernel_seconds: float

    def seconds(self, work: Work) -> float:
        """Predicted seconds of a program's work."""
        return (
            work.flops / self.flops_per_second
            + work.state_updates / self.updates_per_second
            + work.moved_bytes / self.bytes_per_second
            + work.kernels * self.kernel_seconds
        )

    def scaled(self, factor: float) -> Rates:
        """The same model of a device `factor` times slower."""
        return Rates(
            self.flops_per_second / factor,
            self.updates_per_second / factor,
            self.bytes_per_second / factor,
            self.kernel_seconds * factor,
        )


def device_rates(device: Device) -> Rates:
    """Rates from a device's description: on accelerators a state update costs about as much as 64 tensor-core FLOPs."""
    flops = device.peak_flops * device.flops_efficiency
    updates = 2.8e9 if device.kind == "cpu" else flops / 64
    return Rates(flops, updates, device.memory_bandwidth * device.memory_efficiency, 3e-6)


@dataclass(frozen=True)
class Affine:
    """seconds = constant + slope · steps, from timings at two chunk lengths (or one: constant 0)."""

    constant: float
    slope: float

    def __call__(self, length: int) -> float:
        return self.constant + self.slope * length


@dataclass(frozen=True)
class TileTimes:
    """Measured seconds of one template's programs. past: of attention to earlier chunks, for each of a chunk's steps with each
    step before it, of the three.
    """

    forward: Affine
    keeping: Affine | None
    vjp: Affine | None
    past: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Outside:
    """What is live beside the tiles, by kind, and the dtypes' rule for gradients.

    parameter_bytes: bytes of every parameter by name, and of its gradient accumulator (0 where none is wanted).
    """

    resident_bytes: Mapping[str, int]
    turn_bytes: Mapping[str, int]
    publish_bytes: tuple[int, ...]
    ties: tuple[Tie, ...] = ()
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class CostModel:
    """Costs at any chunk length; tables are made on demand and kept."""

    stack: ResidualStack
    splits: tuple[Split | None, ...]  # by template
    seq_len: int
    outside: Outside
    rates: Rates
    policy: KeepPolicy
    times: tuple[TileTimes, ...] | None = None  # measured, by template; None: the analytic model
    recording: RecordingPolicy | None = None  # None: every kernel is launched by itself
    _programs: dict[int, tuple[TilePrograms, ...]] = field(default_factory=dict)
    joins: tuple[JoinGraphs, ...] = ()  # by template, where ranges of time may be joined by summaries

    def programs(self, length: int) -> tuple[TilePrograms, ...]:
        """Programs of every template at a chunk length."""
        if length not in self._programs:
            pairs = zip(self.stack.templates, self.splits, strict=True)
            self._programs[length] = tuple(tile_programs(template, split, length) for template, split in pairs)
        return self._programs[length]

    def join_programs(self, length: int) -> tuple[JoinPrograms, ...]:
        """What joins ranges of every template, for chunks of a length; nothing where they aren't to be joined."""
        return tuple(join_programs(graphs, length) for graphs in self.joins)

    def recorded(self, length: int) -> RecordedPrograms | None:
        """The programs that are recorded at a chunk length; None where there are none."""
        found = None if self.recording is None else recorded_programs(self, self.recording, length)
        return found if found is not None and found.programs else None

    def last_length(self, chunk: int) -> int:
        """Length of the last chunk."""
        return self.seq_len - (math.ceil(self.seq_len / chunk) - 1) * chunk

    def __call__(self, chunk: int) -> StackCosts:
        """The cost tables at chunk length `chunk`."""
        last, recorded = self.last_length(chunk), self.recorded(chunk)
        held = {} if recorded is None else {RESIDENT_KIND: recorded.total_bytes}
        return StackCosts(
            seq_len=self.seq_len,
            chunk=chunk,
            chunk_count=math.ceil(self.seq_len / chunk),
            layers=self._table(chunk),
            last_layers=self._table(last),
            resident_bytes={**self.outside.resident_bytes, **held},
            turn_bytes=dict(self.outside.turn_bytes),
            publish_bytes=self.outside.publish_bytes,
            keeps=self.policy.value,
            ties=self.outside.ties,
            coupling=self.stack.variant.coupling.value,
            adjoint_window=self.stack.variant.adjoint_window,
            shares_cotangent=self._shares_cotangent(),
            shared_sides=self._shared_sides(),
            gradients=() if self._shares_cotangent() else self.outside.gradients,
            joins=self._joins(chunk) if math.ceil(self.seq_len / chunk) >= FEWEST_RANGES else (),
        )

    def _joins(self, length: int) -> tuple[JoinCost, ...]:
        """The costs of joining ranges in each layer; work takes as much longer than the rates say as that of the tile does."""
        found, layers = [], {layer.template: layer for layer in self.stack.layers}
        for index, (programs, tile) in enumerate(zip(self.join_programs(length), self.programs(length), strict=False)):
            forward_seconds, _, adjoint_seconds = self._seconds(index, tile, length)
            forward = self._at_pace(forward_seconds, tile.forward)
            backward = forward if tile.vjp is None else self._at_pace(adjoint_seconds, tile.vjp)
            template = self.stack.templates[index]
            placeholders = zip(template.graph.graph.find_nodes(op="placeholder"), template.inputs, strict=True)
            streams = [node.meta["val"] for node, entry in placeholders if entry.kind is InputKind.STREAM]
            cut = sum(number_of_bytes(value, template.time, programs.steps) for value in streams)
            sides, _ = self._slices(template, length)
            found.append(join_cost(programs, template, layers[index], (sides, sides + cut), forward, backward))
        return tuple(found[layer.template] for layer in self.stack.layers) if found else ()

    def _at_pace(self, seconds: float, program: Program) -> Callable[[Work], float]:
        """Seconds of work that is like a program's, which takes `seconds`."""
        expected = self.rates.seconds(program.work)
        rates = self.rates.scaled(seconds / expected) if seconds > 0 and expected > 0 else self.rates
        return rates.seconds

    def _table(self, length: int) -> tuple[TileCost, ...]:
        programs = self.programs(length)
        by_template = [self._tile(i, programs[i], length) for i in range(len(programs))]
        return tuple(replace(by_template[layer.template], name=layer.name) for layer in self.stack.layers)

    def _seconds(self, index: int, programs: TilePrograms, length: int) -> tuple[float, float, float]:
        """Of forward, forward with keep, and VJP."""
        parts = (programs.forward, programs.keeping, programs.vjp)
        if self.times is not None:
            times = self.times[index]
            own = [0.0 if part is None else part(length) for part in (times.forward, times.keeping, times.vjp)]
            past = [length * self._before(length) * seconds for seconds in times.past]
        else:
            own = [0.0 if part is None else self.rates.seconds(part.work) for part in parts]
            past = [self._past_flops(part, length) / self.rates.flops_per_second for part in parts]
        return tuple(a + b for a, b in zip(own, past, strict=True))  # type: ignore[return-value]

    def _before(self, length: int) -> float:
        """Steps before a chunk, on average: half of those beside it."""
        return max(0, self.seq_len - length) / 2

    def _past_flops(self, program: Program | None, length: int) -> int:
        """Of attention to the chunks before."""
        return 0 if program is None else int(program.work.past_flops * self._before(length))

    def _tile(self, index: int, programs: TilePrograms, length: int) -> TileCost:
        template = self.stack.templates[index]
        forward_seconds, keep_seconds, adjoint_seconds = self._seconds(index, programs, length)
        outputs = _outputs(template)
        side_bytes, out_bytes = self._slices(template, length)
        vjp, keeping = programs.vjp, programs.keeping
        wanted = [template.inputs[i].kind for i in programs.gradients]
        read = [template.inputs[i].kind for i in programs.reads]
        streams = [number_of_bytes(v, template.time, length) for kind, _, v in outputs if kind is OutputKind.STREAM]
        carries = [number_of_bytes(v, template.time, length) for kind, _, v in outputs if kind is OutputKind.CARRY]
        states = [v.dtype for kind, _, v in outputs if kind is OutputKind.CARRY]
        narrow = sum(b // d.itemsize * narrow_dtype(d).itemsize for b, d in zip(carries, states, strict=True))
        adjoints = self._adjoint_values(index, outputs)
        stored_bytes = sum(number_of_bytes(v, template.time, length) for kind, d, v in outputs if kind is OutputKind.STORED and d)
        return TileCost(
            name="",
            stream_bytes=sum(streams),
            carry_bytes=sum(carries),
            keep_bytes=programs.saved_bytes,
            cotangent_bytes=sum(streams) if any(d for kind, d, _ in outputs if kind is OutputKind.STREAM) else 0,
            adjoint_bytes=sum(number_of_bytes(v, template.time, length) for v in adjoints),
            forward_workspace_bytes=programs.forward.workspace_bytes + side_bytes,
            keep_workspace_bytes=_workspace(keeping) + side_bytes,
            adjoint_workspace_bytes=_workspace(vjp) + side_bytes + out_bytes + stored_bytes,
            forward_seconds=forward_seconds,
            keep_seconds=keep_seconds,
            adjoint_seconds=adjoint_seconds,
            forward_flops=programs.forward.work.flops + self._past_flops(programs.forward, length),
            adjoint_flops=0 if vjp is None else vjp.work.flops + self._past_flops(vjp, length),
            reads_input=InputKind.STREAM in read,
            reads_output=bool(programs.reads_outputs),
            reads_carry=InputKind.CARRY in read,
            has_vjp=vjp is not None,
            passes_cotangent=InputKind.STREAM in wanted,
            reads_past=any(entry.kind is InputKind.PAST for entry in template.inputs),
            narrow_bytes=narrow if narrow < sum(carries) else 0,
        )

    def _shares_cotangent(self) -> bool:
        """Whether every layer with a VJP hands the stream's cotangent on unchanged, so that all can read the head's."""
        bottom = next((k for k, layer in enumerate(self.stack.layers) if self.splits[layer.template] is not None), 0)
        splits = [self.splits[layer.template] for layer in self.stack.layers[max(bottom + 1, 1) : -1]]
        residual = self.stack.variant.coupling is Coupling.RESIDUAL
        return residual and all(split is not None and split.joint.hands_cotangent_on for split in splits)

    def _shared_sides(self) -> tuple[tuple[int, ...], ...]:
        """For each side input whose gradient several layers add to: those layers."""
        users: dict[int, dict[int, None]] = {}
        for k, layer in enumerate(self.stack.layers):
            split, template = self.splits[layer.template], self.stack.templates[layer.template]
            for i in split.joint.gradients if split is not None else ():
                if template.inputs[i].kind is InputKind.SIDE:
                    users.setdefault(layer.sides[template.inputs[i].index], {})[k] = None
        return tuple(sorted({tuple(layers) for layers in users.values() if len(layers) > 1}))

    def _adjoint_values(self, index: int, outputs: list[tuple[OutputKind, bool, Any]]) -> list[Any]:
        """What travels backward in time: cotangents of states, or, under a window, what the window needs of later steps."""
        split = self.splits[index]
        given = {} if split is None else dict(split.joint.cotangent_values())
        return [given.get(i, v) for i, (kind, d, v) in enumerate(outputs) if kind is OutputKind.CARRY and d]

    def _slices(self, template: Template, length: int) -> tuple[int, int]:
        """Bytes of the chunks cut out of whole-sequence values that are not dense as they stand: of sides, and of output
        cotangents.
        """
        placeholders = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
        sides = [n.meta["val"] for n, i in zip(placeholders, template.inputs, strict=True) if i.kind is InputKind.SIDE]
        side_bytes = sum(number_of_bytes(v, template.time, length) for v in sides if _slice_copies(v))
        outs = [v for kind, _, v in _outputs(template) if kind is OutputKind.OUT]
        return side_bytes, sum(number_of_bytes(v, template.time, length) for v in outs if _slice_copies(v))


def _slice_copies(value: Any) -> bool:
    """A slice along time is dense only where everything before time has size 1."""
    timed = [dim for dim, size in enumerate(value.shape) if not isinstance(size, int)]
    return bool(timed) and any(int(size) > 1 for size in value.shape[: timed[0]])


def _outputs(template: Template) -> list[tuple[OutputKind, bool, Any]]:
    nodes = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
    return [(o.kind, o.differentiable, n.meta["val"]) for o, n in zip(template.outputs, nodes, strict=True)]


def _workspace(program: Program | None) -> int:
    return 0 if program is None else program.workspace_bytes
