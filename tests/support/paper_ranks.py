"""What ranks do in the tests of approximate gradients: the same model with a mesh and without."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from generated import BlockSpec, CallSpec, StackSpec, build, call_of
from torch.distributed.device_mesh import init_device_mesh

import adjcomp

FORMS: tuple[dict[str, Any], ...] = ({"coupling": "residual"}, {"adjoint_window": 5})


def distances(rank: int, dimension: str) -> list[float]:
    """For each form the worst |g - g_one| / |g_one| of this rank's parameters, g_one made by one process."""
    spec = StackSpec((BlockSpec("diagonal"), BlockSpec("selective"), BlockSpec("ssd")), loss="outer")
    run = call_of(spec, CallSpec(2, 14, 1, 3))
    found = []
    for form in FORMS:
        model = build(spec)
        run(adjcomp.compile(model, chunk=3, **form)).backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(dimension,))
        compiled = adjcomp.compile(model, mesh=mesh, chunk=3, **form)
        run(compiled).backward()
        mine = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
        found.append(max(float((g - wanted[n]).norm() / (wanted[n].norm() + 1e-3)) for n, g in mine.items()))
    return found
