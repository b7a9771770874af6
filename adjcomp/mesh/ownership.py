"""Which parameters a rank needs, and letting go of those it doesn't."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from adjcomp.ir.executable import Executable
from adjcomp.ir.residency import all_on_each
from adjcomp.ir.stack import ResidualStack
from adjcomp.ir.transfers import Sum
from adjcomp.runtime.mesh.passes import layer_of


def layers_of(executable: Executable, device: int) -> frozenset[int]:
    """Layers with work on a device of a plan."""
    head = executable.plan.costs.head
    found = {layer_of(action, head) for action in executable.plan.actions if action.device == device}
    return frozenset(layer for layer in found if layer is not None)


def ranges_of(executable: Executable, shape: tuple[int, int]) -> tuple[tuple[int, int] | None, ...] | None:
    """First and last layer of each stage of (stages, devices of a stage), None for one without any; None where stages share
    layers.
    """
    stages, lanes = shape
    own = [frozenset().union(*(layers_of(executable, i * lanes + j) for j in range(lanes))) for i in range(stages)]
    if sum(map(len, own)) > len(executable.stack.layers):
        return None
    return tuple((min(layers), max(layers)) if layers else None for layers in own)


def layers_by_rank(executable: Executable, ranks: Sequence[int]) -> str:
    """Which rank has which layers, in words."""
    parts = []
    for device, rank in enumerate(ranks):
        own = sorted(layers_of(executable, device))
        names = [executable.stack.layers[k].name for k in own]
        parts.append(f"rank {rank} has {' to '.join(dict.fromkeys((names[0], names[-1]))) if names else 'no layers'}")
    return ", ".join(parts)


def everywhere(executable: Executable) -> bool:
    """Whether gradients of a plan are added up over devices that each have all layers."""
    plan = executable.plan
    own = [layers_of(executable, device) for device in range(len(plan.shares))]
    return all_on_each(own, plan.costs.head + 1) and any(isinstance(action, Sum) for action in plan.actions)


def needed_names(executable: Executable, device: int) -> frozenset[str]:
    """Parameters and buffers that a device reads: those of its layers, of no layer, and what the graphs around the tiles read."""
    stack, own = executable.stack, layers_of(executable, device)
    in_layers = {name for layer in stack.layers for name in layer.parameters}
    names = {name for k in own for name in stack.layers[k].parameters}
    names |= {name for name in stack.placeholder_names if name not in in_layers}
    return frozenset(names) | around(stack) | frozenset(stack.updates)


def around(stack: ResidualStack) -> frozenset[str]:
    """Parameters and buffers that the graphs around the tiles read."""
    names: set[str] = set()
    for graph in (stack.prologue.graph, stack.epilogue.graph):
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        names |= {name for name, node in zip(stack.placeholder_names, nodes, strict=False) if node.users}
    return frozenset(names)


@torch.no_grad()
def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of tensors and leave stand-ins of their shape: NaN all over, so that using one can't go unnoticed.

    All stand-ins of a dtype and device share one element.
    """
    shared: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key not in shared:
            nothing = float("nan") if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
            shared[key] = torch.full((1,), nothing, dtype=tensor.dtype, device=tensor.device)
        tensor.data = shared[key].expand(tensor.shape)
