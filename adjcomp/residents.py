"""What lives beside the tiles, by layer: for plans in which a device has some of the layers only.

Inputs, sides made of them, and what belongs to no layer are on every device; parameters, their gradients and their optimizer
state, and per-token outputs, are where their layer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from adjcomp.budget import SHARDS, Held, gradient_bytes, input_bytes, out_bytes, store_bytes, wanted_parameters
from adjcomp.ir.residency import GRADIENTS, KEYS, KEYS_SENT, Item, Residency
from adjcomp.ir.stack import Layer, ResidualStack
from adjcomp.passes.split import Split


def layer_residency(
    stack: ResidualStack,
    splits: Sequence[Split | None],
    held: Held,
    optimizer: Mapping[str, int],
    side_bytes: int,
    seq_len: int,
) -> Residency:
    """The items of every layer. `optimizer`: bytes of state by parameter; `side_bytes`: of all sides that the prologue makes."""
    wanted = frozenset(wanted_parameters(stack, tuple(splits)))
    everywhere = tuple(_everywhere(stack, held, optimizer, side_bytes))
    layers = []
    for layer in stack.layers:
        stores = _stores(layer, splits[layer.template] is not None, seq_len)
        own = (*_parameters(layer, held, optimizer, wanted), *_outputs(stack, layer, seq_len), *stores)
        layers.append((*everywhere, *own))
    return Residency(tuple(layers))


def _everywhere(stack: ResidualStack, held: Held, optimizer: Mapping[str, int], side_bytes: int) -> Iterator[Item]:
    """Inputs, sides, sums, and parameters and buffers that no layer reads."""
    sums = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in stack.sums)
    yield Item("inputs", "inputs", input_bytes(held.inputs) + side_bytes, False)
    yield Item("sums", "outputs", sums, False)
    owned = {name for layer in stack.layers for name in layer.parameters}
    for name in {**held.parameters, **held.buffers}:
        if name not in owned:
            yield from _tensor(name, held, optimizer)


def _parameters(layer: Layer, held: Held, optimizer: Mapping[str, int], wanted: frozenset[str]) -> Iterator[Item]:
    """A layer's parameters and buffers with what belongs to them."""
    for name in dict.fromkeys(layer.parameters):
        yield from _tensor(name, held, optimizer)
        if name in wanted:
            yield Item(name, GRADIENTS, gradient_bytes(held.parameters[name]), True)


def _tensor(name: str, held: Held, optimizer: Mapping[str, int]) -> Iterator[Item]:
    """A parameter or buffer, its optimizer state, and the gradient that it has already."""
    if name in held.buffers:
        yield Item(name, "buffers", _bytes(held.buffers[name]), False)
        return
    parameter = held.parameters[name]
    yield Item(name, "parameters", _bytes(parameter), False)
    if name in held.beside:
        yield Item(name, SHARDS, held.beside[name], False)
    if optimizer.get(name, 0):
        yield Item(name, "optimizer", optimizer[name], False)
    if parameter.grad is not None:
        yield Item(name, "accumulated gradients", _bytes(parameter.grad), False)


def _outputs(stack: ResidualStack, layer: Layer, seq_len: int) -> Iterator[Item]:
    """Per-token outputs that a layer writes, and their cotangents."""
    for index in dict.fromkeys(layer.outs):
        info = stack.outs[index]
        size = out_bytes(info.shape, seq_len, info.axis.outer * info.axis.inner, info.dtype)
        yield Item(f"output {index}", "outputs", size, False)
        yield Item(f"output {index}", "output cotangents", size, True)


def _stores(layer: Layer, has_vjp: bool, seq_len: int) -> Iterator[Item]:
    """Keys and values of attention, and what comes back to them."""
    if layer.stores:
        kept, sent = store_bytes(layer, has_vjp, seq_len)
        yield Item(f"keys of {layer.name}", KEYS, kept, False)
        yield Item(f"keys of {layer.name}", KEYS_SENT, sent, True)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
