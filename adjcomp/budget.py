"""Budgets against devices, and what a step holds beside its tiles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from adjcomp.ir.costs import Gradient, Tie
from adjcomp.ir.residency import GRADIENTS, KEYS, KEYS_SENT
from adjcomp.ir.stack import InputKind, Layer, ResidualStack
from adjcomp.passes.cost import Outside
from adjcomp.passes.split import Split
from adjcomp.runtime.memory import distinct_bytes
from adjcomp.runtime.values import accumulation_dtype
from adjcomp.units import format_bytes, parse_bytes

SHARDS = "shards"  # kind of what a step holds beside the parameters that are sharded


def device_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device, own_bytes: int) -> int:
    """What a step may use when no budget is given: what is free now, and what the model already holds."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + own_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + own_bytes


def check_budget(mem_budget: int | str | None, device: torch.device) -> int | None:
    """Bytes of a budget. ValueError or TypeError for another form, or for more than the device has."""
    if mem_budget is None:
        return None
    budget = parse_bytes(mem_budget)
    whole = device_bytes(device) if device.type != "meta" else budget
    if budget > whole:
        raise ValueError(f"mem_budget {format_bytes(budget)} is more than {device} has ({format_bytes(whole)})")
    return budget


@dataclass(frozen=True)
class Held:
    """Tensors that are live around a step.

    beside: bytes by parameter that a step holds beside those of one that is sharded over ranks.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    optimizer_bytes: int
    beside: Mapping[str, int] = field(default_factory=dict)

    def resident_bytes(self) -> dict[str, int]:
        """By kind; storages counted once."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return {
            "parameters": distinct_bytes(self.parameters.values()),
            "buffers": distinct_bytes(self.buffers.values()),
            "inputs": input_bytes(self.inputs),
            "accumulated gradients": distinct_bytes(grads),
            "optimizer": self.optimizer_bytes,
            **({SHARDS: sum(self.beside.values())} if self.beside else {}),
        }


def input_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements that the call passes; the same tensor twice counts once, the rest of a larger buffer does not."""
    found = {(t.data_ptr() or id(t), t.dtype, tuple(t.shape)): t.numel() * t.element_size() for t in tensors}
    return sum(found.values())


def outside_costs(stack: ResidualStack, splits: Iterable[Split | None], held: Held, side_bytes: int, seq_len: int) -> Outside:
    """Bytes beside the tiles: resident during the whole step, and from the Turn on."""
    splits = tuple(splits)
    users = _users(stack, splits)
    wanted = tuple(users)
    gradients = {n: gradient_bytes(held.parameters[n]) for n in wanted}
    outs = [out_bytes(o.shape, seq_len, o.axis.outer * o.axis.inner, o.dtype) for o in stack.outs]
    sums = [torch.Size(s.shape).numel() * s.dtype.itemsize for s in stack.sums]
    left = [c for layer in stack.layers for c in layer.carries if c.final is not None]
    finals = [torch.Size(c.shape).numel() * c.dtype.itemsize for c in left]
    resident = {**held.resident_bytes(), "outputs": sum(outs) + sum(sums) + sum(finals)}
    resident["inputs"] += side_bytes
    turn = {GRADIENTS: sum(gradients.values()), "output cotangents": sum(outs)}
    if any(layer.stores for layer in stack.layers):
        sizes = [store_bytes(layer, splits[layer.template] is not None, seq_len) for layer in stack.layers]
        resident[KEYS], turn[KEYS_SENT] = (sum(size) for size in zip(*sizes, strict=True))
    return Outside(
        resident_bytes=resident,
        turn_bytes=turn,
        publish_bytes=_publish_bytes(stack, held, wanted),
        ties=_ties(users, gradients),
        gradients=_gradients(users, held),
    )


def _users(stack: ResidualStack, splits: tuple[Split | None, ...]) -> dict[str, tuple[int, ...]]:
    """The parameters that the VJPs make gradients for, each with the layers that have it."""
    users: dict[str, dict[int, None]] = {}
    for k, layer in enumerate(stack.layers):
        for name in _layer_wanted(stack, splits, layer):
            users.setdefault(name, {})[k] = None
    return {name: tuple(layers) for name, layers in users.items()}


def _ties(users: Mapping[str, tuple[int, ...]], gradients: Mapping[str, int]) -> tuple[Tie, ...]:
    """Trained parameters that several layers share, by the set of those layers."""
    sizes: dict[tuple[int, ...], int] = {}
    for name, size in gradients.items():
        if len(users[name]) > 1:
            sizes[users[name]] = sizes.get(users[name], 0) + size
    return tuple(Tie(layers, size) for layers, size in sorted(sizes.items()))


def _gradients(users: Mapping[str, tuple[int, ...]], held: Held) -> tuple[Gradient, ...]:
    """All gradients, those of the same layers together."""
    sizes: dict[tuple[int, ...], tuple[int, int]] = {}
    for name, layers in users.items():
        parameter = held.parameters[name]
        made, published = sizes.get(layers, (0, 0))
        sizes[layers] = made + gradient_bytes(parameter), published + parameter.numel() * parameter.element_size()
    return tuple(Gradient(layers, *both) for layers, both in sorted(sizes.items()))


def store_bytes(layer: Layer, has_vjp: bool, seq_len: int) -> tuple[int, int]:
    """Bytes of the keys and values that a layer keeps over the sequence, and of the cotangents that come back to them."""
    sizes = [(info, torch.Size(info.shape(seq_len)).numel()) for info in layer.stores]
    kept = sum(count * info.dtype.itemsize for info, count in sizes)
    return kept, sum(count * accumulation_dtype(info.dtype).itemsize for info, count in sizes if has_vjp and info.wanted)


def gradient_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a parameter's gradient accumulator."""
    return parameter.numel() * accumulation_dtype(parameter.dtype).itemsize


def out_bytes(shape: tuple[int | None, ...], seq_len: int, factor: int, dtype: torch.dtype) -> int:
    """Bytes of a per-token output over the whole sequence."""
    return torch.Size([seq_len * factor if n is None else n for n in shape]).numel() * dtype.itemsize


def wanted_parameters(stack: ResidualStack, splits: tuple[Split | None, ...]) -> tuple[str, ...]:
    """Names of the parameters that the VJPs make gradients for."""
    return tuple(_users(stack, splits))


def _layer_wanted(stack: ResidualStack, splits: tuple[Split | None, ...], layer: Layer) -> Iterator[str]:
    """The same of one layer."""
    split = splits[layer.template]
    for i in split.joint.gradients if split is not None else ():
        entry = stack.templates[layer.template].inputs[i]
        if entry.kind is InputKind.PARAMETER:
            yield layer.parameters[entry.index]


def _publish_bytes(stack: ResidualStack, held: Held, wanted: tuple[str, ...]) -> tuple[int, ...]:
    """A cast to the parameter's dtype, one parameter at a time, where the accumulator has another."""
    casts = []
    for layer in stack.layers:
        sizes = [
            held.parameters[n].numel() * held.parameters[n].element_size() for n in layer.parameters if _is_cast(held, wanted, n)
        ]
        casts.append(max(sizes, default=0))
    return tuple(casts)


def _is_cast(held: Held, wanted: tuple[str, ...], name: str) -> bool:
    return name in wanted and accumulation_dtype(held.parameters[name].dtype) is not held.parameters[name].dtype


__all__ = [
    "Held",
    "check_budget",
    "device_bytes",
    "free_bytes",
    "gradient_bytes",
    "input_bytes",
    "out_bytes",
    "outside_costs",
    "wanted_parameters",
]
