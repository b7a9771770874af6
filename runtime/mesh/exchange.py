"""What one step of a rank has to do with other ranks: values that come and go, results and gradients that are added up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from adjcomp.errors import RankError
from adjcomp.ir.actions import Action
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.link import Link
from adjcomp.runtime.mesh.part import Part, Spec
from adjcomp.runtime.mesh.sharded import Sharding, like_parameter, local_part
from adjcomp.runtime.mesh.waiting import Ticket
from adjcomp.runtime.mesh.wholes import Wholes, circle_of
from adjcomp.runtime.values import Held, StepGradients, StepInputs, StepOutputs, Tensor


@dataclass
class Exchange:
    """One step's traffic of one rank.

    shardings: of the parameters that ranks have in parts, and `sharded` those. active_top: the highest layer that a cotangent
        reaches, from the backward on.
    """

    part: Part
    link: Link
    tracker: StorageTracker
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    sharded: Mapping[str, Tensor] = field(default_factory=dict)
    active_top: int = -1
    wholes: Wholes | None = None  # gathers sharded parameters layer by layer, in plans that take one layer after the other
    _scattered: dict[str, Tensor] = field(default_factory=dict)  # this rank's rows of gradients that are added up
    _coming: dict[Value, Ticket] = field(default_factory=dict)
    _leaving: dict[Value, list[Ticket]] = field(default_factory=dict)
    _summing: list[Ticket] = field(default_factory=list)
    _late: list[tuple[Sum | SumTied, Mapping[str, Tensor]]] = field(default_factory=list)  # sums for the end of the step

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A half of the step: an exception in it is told to the other ranks, who would wait for this one."""
        watch, done = self.link.watch, False
        try:
            yield
            done = True
        finally:
            error = sys.exception()
            if not done and not isinstance(error, RankError):
                watch.fail(watch.own, f"rank {watch.own} raised {type(error).__name__}: {error}")

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters and buffers with the wholes of those that ranks have in parts.

        A plan of several devices goes through layer after layer, and wholes come and go with them. One device goes through chunk
        after chunk: its wholes are gathered once, for both directions.
        """
        executable = self.part.executable
        if self.shardings and len(executable.plan.shares) > 1:
            names = tuple(tuple(n for n in layer.parameters if n in self.shardings) for layer in executable.stack.layers)
            self.wholes = Wholes(self.link, self.tracker, self.part.passes, names, self.shardings, state)
            return self.wholes.state
        whole, coming = dict(state), []
        for name, sharding in self.shardings.items():
            own = local_part(state[name])
            room = sharding.room(own.dtype, own.device)
            self.tracker.track(room)
            coming.append(self.link.gather([(room, sharding.padded(own))], circle_of(sharding), f"the parts of {name}"))
            whole[name] = room[: sharding.shape[0]]
        for ticket in coming:
            self.link.wait(ticket)
        return whole

    def _in_parts(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Gradients of sharded parameters as this rank's part of them; the wholes go one by one."""
        for name, sharding in self.shardings.items():
            whole = gradients.get(name)
            if whole is not None and name in self._scattered:
                gradients[name] = like_parameter(self._scattered.pop(name), self.sharded[name])
            elif whole is not None:
                gradients[name] = like_parameter(sharding.own_rows(whole), self.sharded[name])
                del whole
        return gradients

    def before(self, action: Action) -> None:
        """Wait for what an action reads. RankError where a rank has failed."""
        self.link.watch.moved()
        self.link.watch.check()
        costs = self.part.executable.plan.costs
        if self.wholes is not None:
            self.wholes.before(action, costs.head)
        if self._coming:
            for value in action.reads(costs):
                self._arrive(value)

    def drop(self, value: Value) -> None:
        """Wait for the transfers of a value that is about to be dropped."""
        self._arrive(value)
        for ticket in self._leaving.pop(value, ()):
            self.link.wait(ticket)

    def send(self, action: Send, held: Held) -> None:
        """Begin to send a value."""
        if self._travels(action.value):
            parts = [_flat(tensor) for tensor in self._laid_out(action.value, held)]
            ticket = self.link.send(parts, action.to, self.part.tag(action.value), str(action.value))
            self._leaving.setdefault(action.value, []).append(ticket)

    def receive(self, action: Receive) -> Held:
        """Make room for a value and begin to receive it; nothing where nothing comes."""
        if not self._travels(action.value):
            return [None]
        held: Held = [None if spec is None else self._room(spec) for spec in self.part.specs(action.value)]
        parts = [_flat(tensor) for tensor in held if tensor is not None]
        self._coming[action.value] = self.link.receive(parts, action.source, self.part.tag(action.value), str(action.value))
        return held

    def add(self, action: Sum | SumTied, gradients: Mapping[str, Tensor]) -> None:
        """Begin to add up gradients over the devices that have them; at the end, where wholes of parameters come and go: what is
        left of those gradients then takes the wholes' place.
        """
        if self.wholes is None:
            self._begin(action, gradients)
        else:
            self._late.append((action, gradients))

    def _begin(self, action: Sum | SumTied, gradients: Mapping[str, Tensor]) -> None:
        names = [name for name in self.part.summed(action) if name in gradients]
        holders = self.part.holders(action)
        cut = [name for name in names if name in self.shardings and self._is_cut_evenly(self.shardings[name], holders)]
        self.link.traffic.summed += sum(gradients[name].numel() * gradients[name].element_size() for name in names)
        for name in cut:
            whole, sharding = _summable(gradients[name]), self.shardings[name]
            rows = whole.new_empty((sharding.rows, *whole.shape[1:]))
            self.tracker.track(rows)
            self._scattered[name] = rows
            self._summing.append(self.link.scattered([(rows, whole)], circle_of(sharding), f"the gradient of {name}"))
        parts = [_summable(gradients[name]) for name in names if name not in cut]
        if parts:
            self._summing.append(self.link.total(parts, holders, f"the gradient of {names[0]}"))

    def _is_cut_evenly(self, sharding: Sharding, holders: tuple[int, ...]) -> bool:
        """Whether the ranks that add a gradient up are those that have equal parts of it."""
        ranks = tuple(self.link.circle.ranks[device] for device in holders)
        return ranks == sharding.ranks and sharding.rows * len(ranks) == sharding.shape[0]

    def complete_outputs(self, outputs: StepOutputs) -> None:
        """Give every rank the loss sums, per-token outputs and final states: a rank has its own part of them and else zeros."""
        if self.wholes is not None:
            self.wholes.finish_forward()
        for k, layer in enumerate(self.part.executable.stack.layers):
            for info in layer.carries:
                if info.final is not None and k not in self.part.ends:
                    made = torch.zeros(info.shape, dtype=info.dtype, device=self.link.device)
                    self.tracker.track(made)
                    outputs.finals[info.final] = made
        parts = [_summable(tensor) for tensor in (*outputs.sums, *outputs.outs, *outputs.finals)]
        self.link.wait(self.link.total(parts, self._everyone(), "the loss"))

    def complete_gradients(self, found: StepGradients, inputs: StepInputs) -> StepGradients:
        """Wait for all sums; add up what every rank wants (gradients of sides, initial states); average over replicas."""
        if self.wholes is not None:
            self.wholes.finish()
        for action, gradients in self._late:
            self._begin(action, gradients)
        self._late.clear()
        for ticket in self._summing:
            self.link.wait(ticket)
        sides = [self._or_zeros(g, like) for g, like in zip(found.sides, inputs.sides, strict=True)]
        initial = [self._or_zeros(g, like) for g, like in zip(found.initial, inputs.initial, strict=True)]
        outside = [_summable(g) for g in (*sides, *initial) if g is not None]
        if outside:
            self.link.wait(self.link.total(outside, self._everyone(), "the gradients of the inputs"))
        own = [self._scattered.get(name, gradient) for name, gradient in found.parameters.items()]
        mean = self.link.average([_summable(g) for g in (*own, *sides, *initial) if g is not None])
        if mean is not None:
            self.link.wait(mean)
        return StepGradients(self._in_parts(found.parameters), sides, initial)

    def confirm(self) -> None:
        """Return when all ranks are here: none of them hands out gradients while another may still fail."""
        here = torch.zeros(1, dtype=torch.int64)
        self.link.agree(here, self.link.circle, "the end of the step")
        if self.link.replicas is not None:
            self.link.agree(here, self.link.replicas, "the end of the step")

    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.link.circle.ranks)))

    def _or_zeros(self, gradient: Tensor | None, like: Tensor) -> Tensor | None:
        """A rank that has added nothing still takes part in a sum."""
        if gradient is not None or not like.requires_grad or self.active_top < 0:
            return gradient
        made = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        self.tracker.track(made)
        return made

    def _arrive(self, value: Value) -> None:
        ticket = self._coming.pop(value, None)
        if ticket is not None:
            self.link.wait(ticket)

    def _travels(self, value: Value) -> bool:
        """Whether there is anything to move: above the highest tile that a cotangent reaches, nothing flows back."""
        return value.kind is not Kind.COTANGENT or value.layer < self.active_top

    def _laid_out(self, value: Value, held: Held) -> Iterator[Tensor]:
        """The tensors of a value as the other side expects them."""
        for spec, tensor in zip(self.part.specs(value), held, strict=True):
            if spec is not None and tensor is not None and _as_expected(tensor, spec):
                yield tensor
            elif spec is not None:
                made = self._room(spec)
                yield made.zero_() if tensor is None else made.copy_(tensor)

    def _room(self, spec: Spec) -> Tensor:
        made = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self.link.device)
        self.tracker.track(made)
        return made


def _as_expected(tensor: Tensor, spec: Spec) -> bool:
    """Whether a tensor lies in memory as `spec` says; the stride of a dimension of size 1 means nothing."""
    steps = zip(tensor.shape, tensor.stride(), spec.stride, strict=True)
    return tensor.dtype is spec.dtype and all(size == 1 or own == wanted for size, own, wanted in steps)


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as bytes: every backend moves those."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _summable(tensor: Tensor) -> Tensor:
    """A view that can be added up: complex numbers as pairs, truth values as numbers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor.detach()
