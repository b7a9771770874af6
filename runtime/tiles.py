"""Bind a tile's placeholders to what is live, and run its programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adjcomp.ir.executable import Executable
from adjcomp.ir.program import Program
from adjcomp.ir.stack import InputKind, Layer, OutputKind, Template, TileInput, TimeAxis
from adjcomp.ir.values import Value, carry, stream
from adjcomp.runtime.codegen import compiled
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.recording import Call, Recordings, Results
from adjcomp.runtime.slices import chunk_of, slice_in_place
from adjcomp.runtime.values import Held, StepInputs, Tensor, mix_seed, present


@dataclass
class Tiles:
    """The tiles of one step: what they read, and the values that are live. `device` is where the model is."""

    executable: Executable
    inputs: StepInputs
    tracker: StorageTracker
    device: torch.device
    recordings: Recordings | None = None
    values: dict[Value, Held] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # those that tiles have read, without their history
    stores: dict[int, list[Tensor]] = field(default_factory=dict)  # keys and values of the whole sequence, by layer
    before: int = 0  # steps of keys before the first chunk, where a tile is timed alone
    replays: int = 0  # programs that were replayed from recordings

    def layer(self, k: int) -> tuple[Layer, Template]:
        """Layer k and its template."""
        layer = self.executable.stack.layers[k]
        return layer, self.executable.stack.templates[layer.template]

    def span(self, chunk: int) -> tuple[int, int]:
        """First step of a chunk, and the first after it."""
        costs = self.executable.plan.costs
        return chunk * costs.chunk, min((chunk + 1) * costs.chunk, costs.seq_len)

    def arguments(self, k: int, chunk: int, indices: Sequence[int]) -> list[Tensor]:
        """What the placeholders `indices` of tile (k, chunk) get."""
        layer, template = self.layer(k)
        states = self.values.get(carry(k, chunk - 1), [])
        return [self._argument(layer, template.inputs[i], k, chunk, states, self.span(chunk)) for i in indices]

    def derived(self, k: int, chunk: int, indices: Sequence[int], states: Held, steps: int | None = None) -> list[Tensor]:
        """The same for a part of a tile, from other states; steps: of the chunk's end alone."""
        layer, template = self.layer(k)
        start, end = self.span(chunk)
        span = (start if steps is None else end - steps, end)
        return [self._argument(layer, template.inputs[i], k, chunk, states, span) for i in indices]

    def run(
        self,
        k: int,
        program: Program,
        arguments: list[Tensor],
        inputs: Sequence[int],
        gradients: list[Tensor | None],
        passing: frozenset[int] = frozenset(),
    ) -> Results:
        """The results of a program of layer k, which empties `arguments`; recorded and replayed where the plan counts on that.

        inputs: the template's inputs that come first among the arguments. passing: results that the caller reads at once.
        """
        if self.recordings is not None and self.recordings.takes(self.executable, program):
            _, template = self.layer(k)
            fixed = [template.inputs[i].kind is InputKind.PARAMETER for i in inputs]
            fixed += [False] * (len(arguments) - len(fixed))
            made = self.recordings.run(Call(program, k, arguments, fixed, gradients, passing), self.tracker)
            if made is not None:
                self.replays += 1
                return made
        return compiled(program, self.device)(arguments, gradients, self.tracker)

    def forward(self, k: int, chunk: int, *, kept: bool) -> tuple[Results, Held]:
        """Run a tile: its outputs in the template's order, and what it keeps (nothing unless `kept`)."""
        programs = self.executable.tile(k, chunk)
        program = programs.keeping if kept and programs.keeping is not None else programs.forward
        _, template = self.layer(k)
        count, inputs = len(template.outputs), range(len(template.inputs))
        passing = frozenset(i for i, entry in enumerate(template.outputs) if entry.kind in (OutputKind.OUT, OutputKind.SUM))
        results = self.run(k, program, self.arguments(k, chunk, inputs), inputs, [], passing)
        return results[:count], list(results[count:])

    def slice(self, whole: Tensor, axis: TimeAxis, span: tuple[int, int]) -> Tensor:
        """Some steps of a whole-sequence tensor, dense, in the layout that tiles take."""
        part = chunk_of(whole, axis, span)
        if part.is_contiguous():
            return part
        made = part.contiguous()
        self.tracker.track(made)
        return made

    def keep_stores(self, k: int) -> None:
        """Make room for the keys and values of layer k."""
        layer, _ = self.layer(k)
        steps = self.before + self.executable.plan.costs.seq_len
        made = [torch.empty(info.shape(steps), dtype=info.dtype, device=self.device) for info in layer.stores]
        self.tracker.track_all(made)
        self.stores[k] = made

    def past(self, whole: Tensor, span: tuple[int, int]) -> Tensor:
        """The part of a store, or of what comes back to one, that lies before some steps."""
        return whole[:, : self.before + span[0]]

    def own(self, whole: Tensor, span: tuple[int, int]) -> Tensor:
        """The part of those steps."""
        return whole[:, self.before + span[0] : self.before + span[1]]

    def window(self, whole: Tensor, axis: TimeAxis, span: tuple[int, int]) -> Tensor:
        """The place of some steps in a whole-sequence tensor, for writing."""
        return slice_in_place(whole, axis, span)

    def last_steps(self, k: int, chunk: Tensor, steps: int) -> Tensor:
        """The place of the last steps in a tensor like x[k,c]."""
        time = next(dim for dim, size in enumerate(self._stream(k).shape) if not isinstance(size, int))
        return chunk.narrow(time, chunk.shape[time] - steps, steps)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Counted zeros on the step's device."""
        made = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        self.tracker.track(made)
        return made

    def stream_zeros(self, k: int, chunk: int) -> Tensor:
        """Zeros like x[k,chunk]."""
        value = self._stream(k)
        start, end = self.span(chunk)
        return self.zeros([size if isinstance(size, int) else end - start for size in value.shape], value.dtype)

    def _chunk_steps(self, k: int, chunk: int, span: tuple[int, int]) -> Tensor:
        """x[k,chunk], or its last steps."""
        whole = present(self.values[stream(k, chunk)][0])
        if span == self.span(chunk):
            return whole
        part = self.last_steps(k, whole, span[1] - span[0])
        if part.is_contiguous():
            return part
        made = part.contiguous()
        self.tracker.track(made)
        return made

    def _stream(self, k: int) -> Tensor:
        """The traced value of x[k,c]."""
        _, template = self.layer(k)
        nodes: Any = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
        found = (n.meta["val"] for n, o in zip(nodes, template.outputs, strict=True) if o.kind is OutputKind.STREAM)
        value: Tensor = next(found)
        return value

    def _parameter(self, name: str) -> Tensor:
        found = self.parameters.get(name)
        if found is None:
            found = self.parameters[name] = self.inputs.state[name].detach()
        return found

    def _argument(self, layer: Layer, entry: TileInput, k: int, chunk: int, states: Held, span: tuple[int, int]) -> Tensor:
        match entry.kind:
            case InputKind.PARAMETER:
                return self._parameter(layer.parameters[entry.index])
            case InputKind.STREAM:
                return self._chunk_steps(k - 1, chunk, span)
            case InputKind.SIDE:
                side = layer.sides[entry.index]
                axis = self.executable.stack.sides[side].axis
                whole = self.inputs.sides[side].detach()
                return whole if axis is None else self.slice(whole, axis, span)
            case InputKind.CARRY:
                return present(states[entry.index])
            case InputKind.PAST:
                return self.past(self.stores[k][entry.index], span)
            case InputKind.SEED:
                return self._number(mix_seed(self.inputs.seed, k))
            case InputKind.OFFSET:
                return self._number(span[0])

    def _number(self, value: int) -> Tensor:
        """On the device. Filled there: a copy of a number from the host would wait until the device has caught up."""
        return torch.full((), value, dtype=torch.int64, device=self.device)
