"""Run a plan, action by action, on one device; with an exchange, one device's part of a plan for several.

A `Step` is one call of the model: `forward` runs the actions up to the Turn and returns the sums, per-token outputs and final
states; `backward` runs the rest and returns the gradients. Everything a step holds hangs on it, so an exception leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Free, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.executable import Executable
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.stack import CarryInfo, OutputKind, narrow_dtype
from adjcomp.ir.summaries import RangeAction
from adjcomp.ir.transfers import Fetch, Load, Offload, Receive, Send, Sum, SumTied
from adjcomp.ir.values import Value, carry, keep, narrow, stream
from adjcomp.runtime.backward import Backward
from adjcomp.runtime.host import HostCopies, offloaded_bytes
from adjcomp.runtime.kernels.determinism import fixed_kernels
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.exchange import Exchange
from adjcomp.runtime.ranges import Ranges
from adjcomp.runtime.recording import Recordings, Results
from adjcomp.runtime.resident import ResidentGuard
from adjcomp.runtime.streams import streams_of
from adjcomp.runtime.tiles import Tiles
from adjcomp.runtime.values import Cotangents, Held, StepGradients, StepInputs, StepOutputs, Tensor, present


class Step:
    """One forward and at most one backward of an executable. `exchange`: the way to the other ranks of its plan.
    `recordings`: tiles that earlier steps have recorded.
    """

    def __init__(
        self,
        executable: Executable,
        inputs: StepInputs,
        tracker: StorageTracker,
        exchange: Exchange | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        self.executable = executable
        self.tracker = tracker
        self.exchange = exchange
        device = next(iter(inputs.state.values())).device if exchange is None else exchange.link.device
        self.tiles = Tiles(executable, inputs, tracker, device, recordings)
        if exchange is not None and exchange.wholes is not None:
            exchange.wholes.caches.append(self.tiles.parameters)
        self.actions = executable.plan.actions if exchange is None else exchange.part.actions
        self.turn = next((i for i, action in enumerate(self.actions) if isinstance(action, Turn)), len(self.actions))
        self.streams = streams_of(self.tiles.device)
        self.ranges = Ranges(self.tiles)
        self.outputs = self._new_outputs()
        self.host = self._host()
        self.reverse: Backward | None = None
        self.adjoint_norms: Tensor | None = None  # after the backward, where they are wanted
        budget = executable.plan.shares[0 if exchange is None else exchange.part.device].budget_bytes
        self.guard = ResidentGuard(budget, tracker.live_bytes) if self.tiles.device.type == "cpu" else None

    def _host(self) -> HostCopies | None:
        """What moves values to the host and back, for plans that do."""
        size = offloaded_bytes(self.actions, self.executable.stack)
        return HostCopies(self.executable.plan.costs, self.tracker, self.tiles.device, size) if size else None

    def _new_outputs(self) -> StepOutputs:
        stack, device, seq_len = self.executable.stack, self.tiles.device, self.executable.plan.costs.seq_len
        sums = [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in stack.sums]
        outs = []
        for info in stack.outs:
            length = seq_len * info.axis.outer * info.axis.inner
            shape = [length if n is None else n for n in info.shape]
            make = torch.empty if self.exchange is None else torch.zeros  # what other ranks write is zero here
            outs.append(make(shape, dtype=info.dtype, device=device))
        self.tracker.track_all([*sums, *outs])
        return StepOutputs(sums, outs, [torch.empty(0)] * stack.final_count)

    @torch.no_grad()
    def forward(self) -> StepOutputs:
        """Run the plan up to the Turn."""
        with self._guard(), fixed_kernels(self.tiles.inputs.deterministic):
            for action in self.actions[: self.turn]:
                self._run(action)
            if self.exchange is not None:
                self.exchange.complete_outputs(self.outputs)
        return self.outputs

    def forget(self) -> None:
        """Drop everything held for a backward that will not come."""
        self.tiles.values.clear()
        self.tiles.stores.clear()
        self.host = None

    @torch.no_grad()
    def backward(self, given: Cotangents) -> StepGradients:
        """Run the rest with the cotangents of sums, outs and final states."""
        self.tiles.tracker.track_all(given.outs)  # autograd made them, and they live as long as this runs
        with self._guard(), fixed_kernels(self.tiles.inputs.deterministic):
            return self._reversed(given)

    def _guard(self) -> AbstractContextManager[None]:
        return nullcontext() if self.exchange is None else self.exchange.guard()

    def _reversed(self, given: Cotangents) -> StepGradients:
        layers = reversed_layers(self.actions, self.executable)
        by_layer = self.exchange is None and bool(self.executable.plan.costs.gradients)
        reverse = self.reverse = Backward(self.tiles, self.outputs, given, layers, by_layer=by_layer)
        if self.exchange is not None:
            self.exchange.active_top = reverse.active_top
        for action in self.actions[self.turn :]:
            self._run(action)
        self.reverse = None
        self.forget()
        found = reverse.gradients()
        if self.tiles.inputs.adjoint_norms:
            self.adjoint_norms = reverse.adjoint_norms()
        if self.exchange is not None:
            found = self.exchange.complete_gradients(found, self.tiles.inputs)
            self.exchange.confirm()
        return found

    def _run(self, action: Action) -> None:
        if self.exchange is not None:
            self.exchange.before(action)
        if self.host is not None:
            self.host.before(action)
        match action:
            case Start(first=first, last=last):
                self._start(first, last)
            case Forward(layer=layer, chunk=chunk, keep=kept):
                self._forward(layer, chunk, kept)
            case Loss(chunk=chunk, keep=kept):
                self._forward(self.executable.plan.costs.head, chunk, kept)
            case Recompute(layer=layer, chunk=chunk, keep=kept):
                self._recompute(layer, chunk, kept)
            case Advance(layer=layer, chunk=chunk):
                self._advance(layer, chunk)
            case Turn(first=first, last=last):
                self._reverse().start(first, last)
            case HeadVjp(chunk=chunk):
                self._reverse().vjp(self.executable.plan.costs.head, chunk)
            case Adjoint(layer=layer, chunk=chunk):
                with self.streams.on(action.stream):
                    self._reverse().vjp(layer, chunk)
            case Fork():
                self.streams.fork(self.tiles.values)
            case Join():
                self.streams.join()
            case RangeAction():
                self._range(action)
            case Publish(layer=layer):
                self._reverse().publish(layer)  # gradients leave together, as the result of the bridge to autograd
            case Free():
                pass
            case Send() | Receive() | Sum() | SumTied():
                self._between(action)
            case Offload() | Fetch() | Load():
                self._spill(action)
            case Narrow(layer=layer, chunk=chunk):
                self._convert(carry(layer, chunk), narrow(layer, chunk), [narrow_dtype(d) for d in self._dtypes(layer)])
            case Widen(layer=layer, chunk=chunk):
                self._convert(narrow(layer, chunk), carry(layer, chunk), self._dtypes(layer))
            case _:
                raise NotImplementedError(f"the executor has no rule for {type(action).__name__}")
        for value in action.frees:
            if self.exchange is not None:
                self.exchange.drop(value)
            self.tiles.values.pop(value, None)
        if self.guard is not None:
            self.guard.check(self.tracker.live_bytes)

    def _between(self, action: Send | Receive | Sum | SumTied) -> None:
        """An action that involves other ranks."""
        if self.exchange is None:
            raise RuntimeError("a plan for several devices needs a mesh: compile(model, mesh=…)")
        match action:
            case Send(value=value):
                self.exchange.send(action, self.tiles.values.get(value, []))
            case Receive(value=value):
                self.tiles.values[value] = self.exchange.receive(action)
            case Sum() | SumTied():
                self.exchange.add(action, self._reverse().parameters)

    def _range(self, action: RangeAction) -> None:
        """An action that joins ranges of time."""
        if self.reverse is None:
            self.ranges.forward(action)
        else:
            self.ranges.backward(action, self.reverse)

    def _dtypes(self, layer: int) -> list[torch.dtype]:
        return [info.dtype for info in self.executable.stack.layers[layer].carries]

    def _convert(self, source: Value, target: Value, dtypes: Sequence[torch.dtype]) -> None:
        """A state in another precision; parts of it that have that precision are shared."""
        made: Held = []
        for tensor, dtype in zip(self.tiles.values[source], dtypes, strict=True):
            converted = None if tensor is None else tensor.to(dtype)
            if converted is not tensor:
                self.tracker.track_all([converted])
            made.append(converted)
        self.tiles.values[target] = made

    def _spill(self, action: Offload | Fetch | Load) -> None:
        """An action between the device and its host."""
        if self.host is None:
            raise RuntimeError(f"{action} in a plan that offloads nothing")
        if isinstance(action, Offload):
            self.host.offload(action.value, self.tiles.values[action.value])
        else:
            bring = self.host.fetch if isinstance(action, Fetch) else self.host.load
            self.tiles.values[action.value] = bring(action.value)

    def _reverse(self) -> Backward:
        if self.reverse is None:
            raise RuntimeError("the plan asks for a VJP before its Turn")
        return self.reverse

    def _start(self, first: int, last: int) -> None:
        for k, layer in enumerate(self.executable.stack.layers):
            if layer.carries and first <= k <= last:
                self.tiles.values[carry(k, -1)] = [self._initial(info) for info in layer.carries]
            if layer.stores and first <= k <= last:
                self.tiles.keep_stores(k)

    def _initial(self, info: CarryInfo) -> Tensor:
        made = self.tiles.zeros(info.shape, info.dtype)
        return made if info.initial is None else made.copy_(self.tiles.inputs.initial[info.initial].detach())

    def _forward(self, layer: int, chunk: int, kept: bool) -> None:
        """The first run of a tile: everything it makes counts."""
        outputs, saved = self.tiles.forward(layer, chunk, kept=kept)
        self._take_stream(layer, chunk, outputs)
        self._take_carries(layer, chunk, outputs)
        self._take_results(layer, chunk, outputs)
        for whole, part in zip(self.tiles.stores.get(layer, ()), self._of_kind(layer, outputs, OutputKind.STORED), strict=True):
            self.tiles.own(whole, self.tiles.span(chunk)).copy_(part)
        if kept:
            self.tiles.values[keep(layer, chunk)] = saved

    def _recompute(self, layer: int, chunk: int, kept: bool) -> None:
        """The same again for x and the internals; the state, the loss share and the outputs are known already."""
        outputs, saved = self.tiles.forward(layer, chunk, kept=kept)
        self._take_stream(layer, chunk, outputs)
        if kept:
            self.tiles.values[keep(layer, chunk)] = saved

    def _advance(self, layer: int, chunk: int) -> None:
        """The same again for x and the state, where the border was dropped."""
        outputs, _ = self.tiles.forward(layer, chunk, kept=False)
        self._take_stream(layer, chunk, outputs)
        self._take_carries(layer, chunk, outputs)

    def _of_kind(self, layer: int, outputs: Results, kind: OutputKind) -> list[Tensor]:
        _, template = self.tiles.layer(layer)
        return [present(tensor) for entry, tensor in zip(template.outputs, outputs, strict=True) if entry.kind is kind]

    def _take_stream(self, layer: int, chunk: int, outputs: Results) -> None:
        for made in self._of_kind(layer, outputs, OutputKind.STREAM):
            self.tiles.values[stream(layer, chunk)] = [made]

    def _take_carries(self, layer: int, chunk: int, outputs: Results) -> None:
        states = self._of_kind(layer, outputs, OutputKind.CARRY)
        if not states:
            return
        self.tiles.values[carry(layer, chunk)] = list(states)
        if chunk == self.executable.plan.costs.chunk_count - 1:
            for info, state in zip(self.executable.stack.layers[layer].carries, states, strict=True):
                if info.final is not None:
                    self.outputs.finals[info.final] = state

    def _take_results(self, layer: int, chunk: int, outputs: Results) -> None:
        stack, bound = self.executable.stack, self.executable.stack.layers[layer]
        for index, share in zip(bound.sums, self._of_kind(layer, outputs, OutputKind.SUM), strict=True):
            self.outputs.sums[index].add_(share)
        for index, part in zip(bound.outs, self._of_kind(layer, outputs, OutputKind.OUT), strict=True):
            place = self.tiles.window(self.outputs.outs[index], stack.outs[index].axis, self.tiles.span(chunk))
            place.copy_(part.view(place.shape))


def reversed_layers(actions: Sequence[Action], executable: Executable) -> frozenset[int]:
    """Layers whose gradients some actions make or add up."""
    found = {action.layer for action in actions if isinstance(action, Adjoint | Sum)}
    heads = {executable.plan.costs.head for action in actions if isinstance(action, HeadVjp)}
    return frozenset(found | heads)
