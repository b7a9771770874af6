"""What ranks do in the tests of memory per rank."""

from __future__ import annotations

import torch.distributed as dist
from generated import BlockSpec, CallSpec, StackSpec, build, call_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import adjcomp

SPEC = StackSpec((BlockSpec("selective"), BlockSpec("selective")) * 4, width=8, loss="shifted")
CALL = CallSpec(1, 512, 1, 16)
BUDGET = 1 << 28  # everything is kept


def measured_activations(mesh: DeviceMesh | None) -> int:
    """The measured peak of a step less the model's parameters and gradients, which are here in whole or in part."""
    model, run = build(SPEC), call_of(SPEC, CALL)
    options = adjcomp.Options(collective_timeout_seconds=60.0)
    compiled = adjcomp.compile(model, BUDGET, mesh=mesh, chunk=CALL.chunk, options=options)
    run(compiled).backward()
    here = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in compiled.parameters()}
    gradients = sum(p.grad.untyped_storage().nbytes() for p in compiled.parameters() if p.grad is not None)
    return compiled.stats.measured_peak_bytes - sum(here.values()) - gradients


def activations(rank: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> list[int]:
    """Measured activation bytes under each mesh, after those of this rank alone."""
    found = [measured_activations(None)]
    for names, shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(",")))
        found.append(measured_activations(mesh))
    dist.barrier()
    return found
