"""One rank's part of a plan: its actions, the tensors behind the values that travel, and who adds up which gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from adjcomp.ir.actions import Action, Forward, Loss, Turn
from adjcomp.ir.executable import Executable
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.ir.transfers import Sum, SumTied
from adjcomp.ir.values import Kind, Value
from adjcomp.runtime.mesh.passes import Layers, common_passes

_KINDS = tuple(Kind)
_TAGS = 1 << 30


@dataclass(frozen=True)
class Spec:
    """A tensor that travels: dense, in a known layout, so that both sides agree on its bytes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """The part of device `device` in an executable.

    replicated: every device has all parameters and wants all gradients, also one for which the plan has no work (a sequence with
        fewer chunks than devices).
    """

    executable: Executable
    device: int
    replicated: bool

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Its actions, in the plan's order; where gradients are wanted everywhere, everyone takes part in all sums."""
        own = tuple(action for action in self.executable.plan.actions if action.device == self.device)
        if not self.replicated or any(isinstance(action, Sum) for action in own):
            return own
        sums = tuple(Sum(layer, 0, device=self.device) for layer in self._summed_layers)
        return (*own, *sums) if own else (Turn(1, 0, device=self.device), *sums)

    @cached_property
    def _summed_layers(self) -> tuple[int, ...]:
        """Layers with a Sum, in the order that all devices follow."""
        planned = [action.layer for action in self.executable.plan.actions if isinstance(action, Sum)]
        return tuple(dict.fromkeys(planned)) or tuple(sorted({layers[0] for layers in self.users.values()}, reverse=True))

    @cached_property
    def passes(self) -> tuple[Layers, Layers]:
        """The layers that the devices come by, before the Turn and after it: see `common_passes`."""
        return common_passes(self.executable.plan)

    @cached_property
    def digest(self) -> str:
        """Of the whole plan, as it would be saved."""
        return hashlib.sha256(self.executable.plan.to_json().encode()).hexdigest()

    @cached_property
    def ends(self) -> frozenset[int]:
        """Layers whose last chunk runs here: their final states are here."""
        costs = self.executable.plan.costs
        last = costs.chunk_count - 1
        found = {action.layer for action in self.actions if isinstance(action, Forward) and action.chunk == last}
        heads = {costs.head for action in self.actions if isinstance(action, Loss) and action.chunk == last}
        return frozenset(found | heads)

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Parameters with a gradient and the layers they have it in, lowest first; in the same order on all ranks."""
        users: dict[str, dict[int, None]] = {}
        last = self.executable.plan.costs.chunk_count - 1
        for k, layer in enumerate(self.executable.stack.layers):
            inputs = self.executable.stack.templates[layer.template].inputs
            for i in self.executable.tile(k, last).gradients:
                if inputs[i].kind is InputKind.PARAMETER:
                    users.setdefault(layer.parameters[inputs[i].index], {})[k] = None
        return {name: tuple(layers) for name, layers in users.items()}

    @cached_property
    def _holders(self) -> dict[tuple[type[Action], int], tuple[int, ...]]:
        found: dict[tuple[type[Action], int], dict[int, None]] = {}
        for action in self.executable.plan.actions:
            if isinstance(action, Sum | SumTied):
                found.setdefault(_subject(action), {})[action.device] = None
        return {subject: tuple(sorted(devices)) for subject, devices in found.items()}

    def holders(self, action: Sum | SumTied) -> tuple[int, ...]:
        """Devices that add up together."""
        if self.replicated:
            return tuple(range(len(self.executable.plan.shares)))
        return self._holders[_subject(action)]

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Devices that add up together, in the same order on all of them."""
        sums = (action for action in self.executable.plan.actions if isinstance(action, Sum | SumTied))
        return tuple(dict.fromkeys(self.holders(action) for action in sums))

    def summed(self, action: Sum | SumTied) -> list[str]:
        """Parameters whose gradients are added up: those of a tie, or of a layer without those that a lower layer shares.

        Those of a tie between devices are added up over all of its layers' devices, and not over those of one layer before.
        """
        if isinstance(action, SumTied):
            layers = self.executable.plan.costs.ties[action.tie].layers
            return [name for name, own in self.users.items() if own == layers]
        return [name for name, own in self.users.items() if own[0] == action.layer and own not in self._apart]

    @cached_property
    def _apart(self) -> frozenset[tuple[int, ...]]:
        """Layers of each tie that has a sum of its own."""
        plan = self.executable.plan
        return frozenset(plan.costs.ties[action.tie].layers for action in plan.actions if isinstance(action, SumTied))

    def tag(self, value: Value) -> int:
        """A number for a value, the same on both sides of a transfer."""
        costs = self.executable.plan.costs
        place = _KINDS.index(value.kind) * (costs.head + 1) + value.layer
        return (place * (costs.chunk_count + 1) + value.chunk + 1) % _TAGS

    def specs(self, value: Value) -> list[Spec | None]:
        """The tensors of a value; None for one that doesn't exist (the adjoint of a state that takes no gradient)."""
        layer = self.executable.stack.layers[value.layer]
        template = self.executable.stack.templates[layer.template]
        if value.kind in (Kind.STREAM, Kind.COTANGENT):
            return [self._stream(template, value.chunk)]
        if value.kind in (Kind.HALO, Kind.HALO_ADJOINT):
            return [*self._halos(value)]
        wanted = [o.differentiable or value.kind is Kind.CARRY for o in template.outputs if o.kind is OutputKind.CARRY]
        shapes = [info.shape if value.kind is Kind.CARRY else info.adjoint_shape for info in layer.carries]
        return [
            Spec(shape, _dense_stride(shape), info.dtype) if exists else None
            for info, shape, exists in zip(layer.carries, shapes, wanted, strict=True)
        ]

    def _halos(self, value: Value) -> Iterator[Spec]:
        """The halos of a layer, or those of them that take a cotangent."""
        layer, joins = self.executable.stack.layers[value.layer], self.executable.join(value.layer)
        if value.kind is Kind.HALO:
            carries = () if joins.tail is None else joins.tail.carries
        else:
            outputs = self.executable.stack.templates[layer.template].outputs
            carries = () if joins.tail_vjp is None else tuple(outputs[i].index for i in joins.tail_vjp.cotangents)
        for i in carries:
            shape = layer.carries[i].shape
            yield Spec(shape, _dense_stride(shape), layer.carries[i].dtype)

    def _stream(self, template: Template, chunk: int) -> Spec:
        nodes: Any = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
        made = next(n.meta["val"] for n, o in zip(nodes, template.outputs, strict=True) if o.kind is OutputKind.STREAM)
        costs = self.executable.plan.costs
        length = min(costs.chunk, costs.seq_len - chunk * costs.chunk)
        size = tuple(n if isinstance(n, int) else length for n in made.shape)
        order = sorted(range(len(size)), key=lambda d: -_hint(made.stride()[d]))
        stride, step = [0] * len(size), 1
        for d in reversed(order):
            stride[d], step = step, step * size[d]
        return Spec(size, tuple(stride), made.dtype)


def _hint(step: Any) -> int:
    """A stride at the length that was traced."""
    return step if isinstance(step, int) else int(step.node.hint)


def _dense_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [0] * len(size), 1
    for d in reversed(range(len(size))):
        stride[d], step = step, step * size[d]
    return tuple(stride)


def _subject(action: Sum | SumTied) -> tuple[type[Action], int]:
    return (Sum, action.layer) if isinstance(action, Sum) else (SumTied, action.tie)
