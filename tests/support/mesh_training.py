"""What ranks do in the tests of training scripts on meshes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from generated import BlockSpec, StackSpec, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import adjcomp
from adjcomp import distributed

SPEC = StackSpec((BlockSpec("selective"), BlockSpec("diagonal", mlp=True)), tied=True, loss="shifted")
LENGTH = 12


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 11, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    return ids, ids


def _compiled(model: nn.Module, dimension: str, plan: adjcomp.Plan | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(dimension,))
    options = adjcomp.Options(collective_timeout_seconds=60.0)
    return adjcomp.compile(model, mesh=mesh, chunk=None if plan else 4, plan=plan, options=options)


def _step(compiled: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = compiled(*_inputs())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def resumed(rank: int, folder: str) -> tuple[list[float], list[float], int]:
    """Losses of steps 2 and 3 without a break and after a restart from the checkpoint of step 1; bytes of parameters here."""
    model = build(SPEC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    compiled = _compiled(model, "layers")
    plan = distributed.place(compiled, example_inputs=_inputs(), seq_len=LENGTH)
    _step(compiled, optimizer)
    dcp.save(distributed.local_state(compiled, optimizer), checkpoint_id=folder)
    unbroken = [_step(compiled, optimizer) for _ in range(2)]

    torch.manual_seed(99)
    again = build(SPEC)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    compiled = _compiled(again, "layers", adjcomp.Plan.from_json(plan.to_json()))
    distributed.place(compiled, example_inputs=_inputs(), seq_len=LENGTH)
    dcp.load(distributed.local_state(compiled, optimizer), checkpoint_id=folder)
    restarted = [_step(compiled, optimizer) for _ in range(2)]
    return unbroken, restarted, sum(p.untyped_storage().nbytes() for p in again.parameters())


def reads_its_tokens(rank: int) -> tuple[tuple[int, int], float, float]:
    """The range of this rank, and its losses with all tokens and with its own only."""
    ids, _ = _inputs()
    compiled = _compiled(build(SPEC), "time")
    span = distributed.token_range(compiled, example_inputs=_inputs(), seq_len=LENGTH)
    own = distributed.read_tokens(ids, span)
    return (span.start, span.stop), compiled(ids, ids).item(), compiled(own, own).item()
