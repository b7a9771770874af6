"""Bind a tile's placeholders to what is live, and run its programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adjcomp.ir.executable import Executable
from adjcomp.ir.program import Program
from adjcomp.ir.stack import InputKind, Layer, OutputKind, Template, TimeAxis
from adjcomp.ir.values import Value, carry, stream
from adjcomp.runtime.codegen import Compiled, compile_program
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.slices import chunk_of, slice_in_place
from adjcomp.runtime.values import Held, StepInputs, Tensor, mix_seed, present

_COMPILED: dict[tuple[int, str], tuple[Program, Compiled]] = {}  # by identity; the program is held so that its id stays its own
_MOST_COMPILED = 4096


def compiled(program: Program, device: torch.device) -> Compiled:
    """The function of a program, generated once."""
    key = (id(program), device.type)
    known = _COMPILED.get(key)
    if known is not None:
        return known[1]
    if len(_COMPILED) >= _MOST_COMPILED:
        _COMPILED.clear()
    made = compile_program(program, device.type)
    _COMPILED[key] = (program, made)
    return made


@dataclass
class Tiles:
    """The tiles of one step: what they read, and the values that are live. `device` is where the model is."""

    executable: Executable
    inputs: StepInputs
    tracker: StorageTracker
    device: torch.device
    values: dict[Value, Held] = field(default_factory=dict)

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
        return [self._argument(k, chunk, i) for i in indices]

    def forward(self, k: int, chunk: int, *, kept: bool) -> tuple[Sequence[Tensor], Held]:
        """Run a tile: its outputs in the template's order, and what it keeps (nothing unless `kept`)."""
        programs = self.executable.tile(k, chunk)
        program = programs.keeping if kept and programs.keeping is not None else programs.forward
        _, template = self.layer(k)
        results = compiled(program, self.device)(self.arguments(k, chunk, range(len(template.inputs))), [], self.tracker)
        count = len(template.outputs)
        return results[:count], list(results[count:])

    def slice(self, whole: Tensor, axis: TimeAxis, chunk: int) -> Tensor:
        """A chunk of a whole-sequence tensor, dense, in the layout that tiles take."""
        part = chunk_of(whole, axis, self.span(chunk))
        if part.is_contiguous():
            return part
        made = part.contiguous()
        self.tracker.track(made)
        return made

    def window(self, whole: Tensor, axis: TimeAxis, chunk: int) -> Tensor:
        """The place of a chunk in a whole-sequence tensor, for writing."""
        return slice_in_place(whole, axis, self.span(chunk))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Counted zeros on the step's device."""
        made = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        self.tracker.track(made)
        return made

    def stream_zeros(self, k: int, chunk: int) -> Tensor:
        """Zeros like x[k,chunk]."""
        _, template = self.layer(k)
        nodes: Any = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
        value = next(n.meta["val"] for n, o in zip(nodes, template.outputs, strict=True) if o.kind is OutputKind.STREAM)
        start, end = self.span(chunk)
        return self.zeros([size if isinstance(size, int) else end - start for size in value.shape], value.dtype)

    def _argument(self, k: int, chunk: int, i: int) -> Tensor:
        layer, template = self.layer(k)
        entry = template.inputs[i]
        match entry.kind:
            case InputKind.PARAMETER:
                return self.inputs.state[layer.parameters[entry.index]].detach()
            case InputKind.STREAM:
                return present(self.values[stream(k - 1, chunk)][0])
            case InputKind.SIDE:
                side = layer.sides[entry.index]
                axis = self.executable.stack.sides[side].axis
                whole = self.inputs.sides[side].detach()
                return whole if axis is None else self.slice(whole, axis, chunk)
            case InputKind.CARRY:
                return present(self.values[carry(k, chunk - 1)][entry.index])
            case InputKind.SEED:
                return torch.tensor(mix_seed(self.inputs.seed, k), dtype=torch.int64, device=self.device)
            case InputKind.OFFSET:
                return torch.tensor(self.span(chunk)[0], dtype=torch.int64, device=self.device)
