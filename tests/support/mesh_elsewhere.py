"""What ranks do in the tests of models whose parameters are on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mesh_work
import torch
import torch.distributed as dist
from generated import BlockSpec, CallSpec, StackSpec, build, call_of
from torch.distributed.device_mesh import init_device_mesh

import adjcomp
from adjcomp.compiled import session_of
from adjcomp.mesh.ownership import layers_of

SPEC = StackSpec((BlockSpec("selective"), BlockSpec("diagonal", mlp=True)), loss="shifted")
CALL = CallSpec(1, 12, 3, 4)
SHAPES = (CallSpec(1, 12, 3), CallSpec(2, 12, 1), CallSpec(1, 3, 2), CallSpec(1, 40, 1))


def _error(run: Callable[[], Any]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


def evaluated_and_refused(rank: int) -> tuple[list[float], dict[str, str], str]:
    """Losses of the whole model, of the compiled one without gradients before and after a step, and a step's; errors of what
    reads parameters elsewhere; and what such a parameter prints.
    """
    model, run = build(SPEC), call_of(SPEC, CALL)
    ids = torch.zeros(1, 12, dtype=torch.int64)
    with torch.no_grad():
        losses = [run(model).item()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("layers",))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=4, options=adjcomp.Options(collective_timeout_seconds=60.0))
    with torch.no_grad():
        losses.append(run(compiled).item())
    loss = run(compiled)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    with torch.no_grad():
        losses.append(run(compiled).item())
        errors = {
            "forward": _error(lambda: run(model)),
            "inference": _error(lambda: compiled(ids)),
            "nll": _error(lambda: compiled.nll(ids)),
            "state_dict": _error(model.state_dict),
            "copy": _error(lambda: copy.deepcopy(model)),
            "norm": _error(lambda: [p.norm() for p in model.parameters()]),
        }
    errors["submodules"] = _error(lambda: [layer(torch.zeros(1, 3, 4, dtype=torch.float64)) for layer in model.layers])
    away = next(p for p in model.parameters() if p.untyped_storage().nbytes() == p.element_size() < p.numel() * p.element_size())
    return losses, errors, repr(away)


def of_several_shapes(rank: int) -> tuple[list[float], list[list[int]]]:
    """Calls of several shapes by one compiled model: the distance of its gradients to plain autograd's, and its layers."""
    model, distances, layers = build(SPEC), [], []
    plain = []
    for call in SHAPES:
        call_of(SPEC, call)(model).backward()
        plain.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("layers",))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=4, options=adjcomp.Options(collective_timeout_seconds=60.0))
    for call, wanted in zip(SHAPES, plain, strict=True):
        call_of(SPEC, call)(compiled).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        distances.append(mesh_work.distance_of(found, wanted))
        model.zero_grad(set_to_none=True)
        layers.append(sorted(layers_of(session_of(compiled).executables.popitem()[1], rank)))
    return distances, layers
