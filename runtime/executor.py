"""Run a plan, action by action, on one device.

A `Step` is one call of the model: `forward` runs the actions up to the Turn and returns the sums, per-token outputs and final states;
`backward` runs the rest and returns the gradients. Everything a step holds hangs on it, so an exception anywhere leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.executable import Executable
from adjcomp.ir.program import Program, TilePrograms
from adjcomp.ir.stack import InputKind, Layer, OutputKind, Template
from adjcomp.ir.values import Value, adjoint, carry, cotangent, keep, stream
from adjcomp.runtime.codegen import Compiled, compile_program
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.slices import chunk_of, slice_in_place

Tensor = torch.Tensor
Held = list[Tensor | None]


@dataclass(frozen=True)
class StepInputs:
    """What one call brings: parameters and buffers by name, sides and initial states from the prologue, the step's seed."""

    state: dict[str, Tensor]
    sides: Sequence[Tensor]
    initial: Sequence[Tensor]
    seed: int


@dataclass(frozen=True)
class StepOutputs:
    """What the forward leaves: totals of sums, per-token outputs, final states; in the stack's order."""

    sums: list[Tensor]
    outs: list[Tensor]
    finals: list[Tensor]


@dataclass(frozen=True)
class StepGradients:
    """Gradients in accumulation dtype: by parameter name, by side, by initial state. None: nothing flowed there."""

    parameters: dict[str, Tensor | None]
    sides: list[Tensor | None]
    initial: list[Tensor | None]


@dataclass
class _Backward:
    """What exists from the Turn on. active_top: the highest tile into which a cotangent flows."""

    sums: Sequence[Tensor | None]
    outs: Sequence[Tensor | None]
    finals: Sequence[Tensor | None]
    active_top: int
    accumulators: dict[str, Tensor] = field(default_factory=dict)
    sides: dict[int, Tensor] = field(default_factory=dict)
    initial: dict[int, Tensor] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def _compiled(program: _ById) -> Compiled:
    return compile_program(program.program)


@dataclass(frozen=True, eq=False)
class _ById:
    """Hashes by identity: programs hold lists, and each is compiled once."""

    program: Program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.program is self.program


class Step:
    """One forward and at most one backward of an executable."""

    def __init__(self, executable: Executable, inputs: StepInputs, tracker: StorageTracker) -> None:
        self.executable = executable
        self.stack = executable.stack
        self.costs = executable.plan.costs
        self.inputs = inputs
        self.tracker = tracker
        self.values: dict[Value, Held] = {}
        self.device = next(iter(inputs.state.values())).device
        self.turn = next((i for i, a in enumerate(executable.plan.actions) if isinstance(a, Turn)), len(executable.plan.actions))
        self.outputs = self._new_outputs()
        self.reverse: _Backward | None = None

    def _new_outputs(self) -> StepOutputs:
        seq_len = self.costs.seq_len
        sums = [torch.zeros(s.shape, dtype=s.dtype, device=self.device) for s in self.stack.sums]
        outs = [
            torch.empty([seq_len * o.axis.outer * o.axis.inner if n is None else n for n in o.shape], dtype=o.dtype, device=self.device)
            for o in self.stack.outs
        ]
        self.tracker.track_all([*sums, *outs])
        return StepOutputs(sums, outs, [torch.empty(0)] * self.stack.final_count)

    @torch.no_grad()
    def forward(self) -> StepOutputs:
        """Run the plan up to the Turn."""
        for action in self.executable.plan.actions[: self.turn]:
            self._run(action)
        return self.outputs

    def forget(self) -> None:
        """Drop everything held for a backward that will not come."""
        self.values.clear()

    @torch.no_grad()
    def backward(self, sums: Sequence[Tensor | None], outs: Sequence[Tensor | None], finals: Sequence[Tensor | None]) -> StepGradients:
        """Run the rest with the cotangents of sums, outs and final states; None where a cotangent does not exist."""
        self.reverse = _Backward(sums, outs, finals, self._active_top(sums, outs, finals))
        for action in self.executable.plan.actions[self.turn :]:
            self._run(action)
        reverse, self.reverse = self.reverse, None
        self.values.clear()
        return StepGradients(
            {name: reverse.accumulators.get(name) for name in self.inputs.state},
            [reverse.sides.get(i) for i in range(len(self.stack.sides))],
            [reverse.initial.get(i) for i in range(self.stack.initial_count)],
        )

    def _active_top(self, sums: Sequence[Tensor | None], outs: Sequence[Tensor | None], finals: Sequence[Tensor | None]) -> int:
        """Above this tile no cotangent comes in, so its parameters get no gradient, as in plain autograd."""
        top = -1
        for k, layer in enumerate(self.stack.layers):
            reached = any(sums[i] is not None for i in layer.sums) or any(outs[i] is not None for i in layer.outs)
            reached = reached or any(c.final is not None and finals[c.final] is not None for c in layer.carries)
            top = k if reached else top
        return top

    def _run(self, action: Action) -> None:
        match action:
            case Start():
                self._start()
            case Forward(layer=layer, chunk=chunk, keep=kept):
                self._forward(layer, chunk, kept, new_carry=True)
            case Loss(chunk=chunk, keep=kept):
                self._forward(self.costs.head, chunk, kept, new_carry=True)
            case Recompute(layer=layer, chunk=chunk, keep=kept):
                self._forward(layer, chunk, kept, new_carry=False)
            case Turn():
                self._turn()
            case HeadVjp(chunk=chunk):
                self._vjp(self.costs.head, chunk)
            case Adjoint(layer=layer, chunk=chunk):
                self._vjp(layer, chunk)
            case Publish():
                pass  # gradients leave together, as the result of the bridge to autograd
            case _:
                raise NotImplementedError(f"this executor runs plans of one device; it has no rule for {type(action).__name__}")
        for value in action.frees:
            self.values.pop(value, None)

    def _start(self) -> None:
        for k, layer in enumerate(self.stack.layers):
            if layer.carries:
                self.values[carry(k, -1)] = [self._initial(c.shape, c.dtype, c.initial) for c in layer.carries]

    def _initial(self, shape: tuple[int, ...], dtype: torch.dtype, index: int | None) -> Tensor:
        if index is None:
            made = torch.zeros(shape, dtype=dtype, device=self.device)
        else:
            made = self.inputs.initial[index].detach().to(dtype).clone(memory_format=torch.contiguous_format)
        self.tracker.track(made)
        return made

    def _turn(self) -> None:
        """Make the accumulators of everything that wants a gradient, and the adjoint states after the last chunk."""
        reverse = self._reverse()
        for k, layer in enumerate(self.stack.layers):
            programs = self.executable.tile(k, 0)
            template = self.stack.templates[layer.template]
            self._make_accumulators(layer, template, programs, k <= reverse.active_top)
            if programs.vjp is not None and any(c is not None for c in self._adjoint_slots(layer, template)):
                self.values[adjoint(k, self.costs.chunk_count - 1)] = self._last_adjoint(layer, template)

    def _make_accumulators(self, layer: Layer, template: Template, programs: TilePrograms, active: bool) -> None:
        reverse = self._reverse()
        for i in programs.gradients if active else ():
            entry = template.inputs[i]
            if entry.kind is InputKind.PARAMETER and layer.parameters[entry.index] not in reverse.accumulators:
                reverse.accumulators[layer.parameters[entry.index]] = self._zeros_like(self.inputs.state[layer.parameters[entry.index]])
            elif entry.kind is InputKind.SIDE and layer.sides[entry.index] not in reverse.sides:
                reverse.sides[layer.sides[entry.index]] = self._zeros_like(self.inputs.sides[layer.sides[entry.index]])

    def _zeros_like(self, tensor: Tensor) -> Tensor:
        made = torch.zeros(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)
        self.tracker.track(made)
        return made

    def _adjoint_slots(self, layer: Layer, template: Template) -> list[int | None]:
        """For each carry, its position among the VJP's cotangents; None where it takes no gradient."""
        wanted = {o.index for o in template.outputs if o.kind is OutputKind.CARRY and o.differentiable}
        return [i if i in wanted else None for i in range(len(layer.carries))]

    def _last_adjoint(self, layer: Layer, template: Template) -> Held:
        held: Held = []
        for slot, info in zip(self._adjoint_slots(layer, template), layer.carries, strict=True):
            given = self._reverse().finals[info.final] if info.final is not None else None
            if slot is None:
                held.append(None)
                continue
            made = torch.zeros(info.shape, dtype=info.dtype, device=self.device)
            self.tracker.track(made)
            held.append(made if given is None else made.copy_(given))
        return held

    def _forward(self, layer: int, chunk: int, kept: bool, *, new_carry: bool) -> None:
        bound, programs = self.stack.layers[layer], self.executable.tile(layer, chunk)
        template = self.stack.templates[bound.template]
        program = programs.keeping if kept and programs.keeping is not None else programs.forward
        arguments = [self._argument(template, bound, layer, chunk, i) for i in range(len(template.inputs))]
        results = _compiled(_ById(program))(arguments, [], self.tracker)
        count = len(template.outputs)
        carries: Held = []
        for entry, result in zip(template.outputs, results[:count], strict=True):
            match entry.kind:
                case OutputKind.STREAM:
                    self.values[stream(layer, chunk)] = [result]
                case OutputKind.CARRY:
                    carries.append(result)
                case OutputKind.OUT if new_carry:
                    index = bound.outs[entry.index]
                    self._chunk(self.outputs.outs[index], self.stack.outs[index].axis, chunk).copy_(result)
                case OutputKind.SUM if new_carry:
                    self.outputs.sums[bound.sums[entry.index]].add_(result)
        if carries and new_carry:
            self._hand_on(bound, layer, chunk, carries)
        if kept:
            self.values[keep(layer, chunk)] = list(results[count:])

    def _hand_on(self, bound: Layer, layer: int, chunk: int, carries: Held) -> None:
        self.values[carry(layer, chunk)] = carries
        if chunk == self.costs.chunk_count - 1:
            for info, state in zip(bound.carries, carries, strict=True):
                if info.final is not None and state is not None:
                    self.outputs.finals[info.final] = state

    def _argument(self, template: Template, bound: Layer, layer: int, chunk: int, i: int) -> Tensor:
        """What placeholder i of a tile gets."""
        entry = template.inputs[i]
        match entry.kind:
            case InputKind.PARAMETER:
                return self.inputs.state[bound.parameters[entry.index]].detach()
            case InputKind.STREAM:
                return _present(self.values[stream(layer - 1, chunk)][0])
            case InputKind.SIDE:
                side = bound.sides[entry.index]
                axis = self.stack.sides[side].axis
                whole = self.inputs.sides[side].detach()
                return whole if axis is None else self._dense(chunk_of(whole, axis, self._span(chunk)))
            case InputKind.CARRY:
                return _present(self.values[carry(layer, chunk - 1)][entry.index])
            case InputKind.SEED:
                return torch.tensor(mix_seed(self.inputs.seed, layer), dtype=torch.int64, device=self.device)
            case InputKind.OFFSET:
                return torch.tensor(chunk * self.costs.chunk, dtype=torch.int64, device=self.device)

    def _dense(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        made = tensor.contiguous()
        self.tracker.track(made)
        return made

    def _span(self, chunk: int) -> tuple[int, int]:
        return chunk * self.costs.chunk, min((chunk + 1) * self.costs.chunk, self.costs.seq_len)

    def _chunk(self, whole: Tensor, axis: object, chunk: int) -> Tensor:
        return slice_in_place(whole, axis, self._span(chunk))  # type: ignore[arg-type]

    def _vjp(self, layer: int, chunk: int) -> None:
        reverse = self._reverse()
        if layer > reverse.active_top:
            self._skip(layer, chunk)
            return
        bound, programs = self.stack.layers[layer], self.executable.tile(layer, chunk)
        template = self.stack.templates[bound.template]
        if programs.vjp is None:
            raise RuntimeError(f"layer {bound.name} has no VJP, but the plan asks for one")
        arguments: list[Tensor] = [self._argument(template, bound, layer, chunk, i) for i in programs.reads]
        arguments += [_present(self.values[stream(layer, chunk)][0]) for _ in programs.reads_outputs]
        arguments += [_present(saved) for saved in self.values.pop(keep(layer, chunk))]
        arguments += [self._cotangent(template, bound, layer, chunk, i) for i in programs.cotangents]
        accumulators, stream_slot, carry_slots = self._accumulators(template, bound, chunk, programs)
        results = _compiled(_ById(programs.vjp))(arguments, accumulators, self.tracker)
        self._store(bound, layer, chunk, results, stream_slot, carry_slots)

    def _accumulators(
        self, template: Template, bound: Layer, chunk: int, programs: TilePrograms
    ) -> tuple[list[Tensor | None], int | None, list[int]]:
        """Accumulators by gradient number, and where the cotangents of stream and carries are among the results."""
        reverse = self._reverse()
        accumulators: list[Tensor | None] = []
        stream_slot, carry_slots, position = None, [], 0
        for i in programs.gradients:
            entry = template.inputs[i]
            if entry.kind is InputKind.PARAMETER:
                accumulators.append(reverse.accumulators[bound.parameters[entry.index]])
            elif entry.kind is InputKind.SIDE:
                side = bound.sides[entry.index]
                axis = self.stack.sides[side].axis
                accumulators.append(reverse.sides[side] if axis is None else self._chunk(reverse.sides[side], axis, chunk))
            else:
                accumulators.append(None)
                if entry.kind is InputKind.STREAM:
                    stream_slot = position
                else:
                    carry_slots.append(entry.index)
                position += 1
        return accumulators, stream_slot, carry_slots

    def _store(
        self, bound: Layer, layer: int, chunk: int, results: Sequence[Tensor], stream_slot: int | None, carry_slots: list[int]
    ) -> None:
        reverse = self._reverse()
        rest = list(results)
        if stream_slot is not None:
            self.values[cotangent(layer - 1, chunk)] = [rest.pop(stream_slot)]
        held: Held = [None] * len(bound.carries)
        for index, result in zip(carry_slots, rest, strict=True):
            held[index] = result
        if bound.carries:
            self.values[adjoint(layer, chunk - 1)] = held
        if chunk == 0:
            for info, result in zip(bound.carries, held, strict=True):
                if info.initial is not None and result is not None:
                    known = reverse.initial.get(info.initial)
                    reverse.initial[info.initial] = result if known is None else known.add_(result)

    def _cotangent(self, template: Template, bound: Layer, layer: int, chunk: int, i: int) -> Tensor:
        """The cotangent of output i of a tile; zeros where nothing flowed."""
        reverse, entry = self._reverse(), template.outputs[i]
        given: Tensor | None
        match entry.kind:
            case OutputKind.STREAM:
                given = self.values.pop(cotangent(layer, chunk), [None])[0]
            case OutputKind.CARRY:
                given = self.values[adjoint(layer, chunk)][entry.index]
            case OutputKind.SUM:
                given = reverse.sums[bound.sums[entry.index]]
            case OutputKind.OUT:
                index = bound.outs[entry.index]
                whole = reverse.outs[index]
                given = None if whole is None else self._dense(chunk_of(whole, self.stack.outs[index].axis, self._span(chunk)))
        if given is not None:
            return given
        return self._zero_cotangent(template, bound, layer, chunk, i)

    def _zero_cotangent(self, template: Template, bound: Layer, layer: int, chunk: int, i: int) -> Tensor:
        entry = template.outputs[i]
        match entry.kind:
            case OutputKind.STREAM:
                like = self._stream_like(layer, chunk)
            case OutputKind.CARRY:
                info = bound.carries[entry.index]
                like = torch.empty(info.shape, dtype=info.dtype, device="meta")
            case OutputKind.SUM:
                like = self.outputs.sums[bound.sums[entry.index]]
            case OutputKind.OUT:
                index = bound.outs[entry.index]
                like = chunk_of(self.outputs.outs[index], self.stack.outs[index].axis, self._span(chunk))
        made = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        self.tracker.track(made)
        return made

    def _stream_like(self, layer: int, chunk: int) -> Tensor:
        """Shape and dtype of x[layer,chunk], on the meta device."""
        template = self.stack.templates[self.stack.layers[layer].template]
        outputs = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
        value = next(n.meta["val"] for n, o in zip(outputs, template.outputs, strict=True) if o.kind is OutputKind.STREAM)
        start, end = self._span(chunk)
        return torch.empty([s if isinstance(s, int) else end - start for s in value.shape], dtype=value.dtype, device="meta")

    def _skip(self, layer: int, chunk: int) -> None:
        """No cotangent reaches this tile: drop what was kept for it, hand on nothing."""
        self.values.pop(keep(layer, chunk), None)
        self.values.pop(cotangent(layer, chunk), None)
        held = self.values.get(adjoint(layer, chunk))
        if held is not None:
            self.values[adjoint(layer, chunk - 1)] = held

    def _reverse(self) -> _Backward:
        if self.reverse is None:
            raise RuntimeError("the plan asks for a VJP before its Turn")
        return self.reverse


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a value of the plan is missing")
    return tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed over chunks in float32, float64 where the parameter is: bf16 sums over many chunks would lose digits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def mix_seed(seed: int, layer: int) -> int:
    """A layer's own seed from the step's (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed + (layer + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
