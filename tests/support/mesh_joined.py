"""What ranks do in the tests of time ranges that are joined by summaries: models beside the generated ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from fidelity import tokens
from generated import BlockSpec, CallSpec, StackSpec, build, call_of
from mesh_grid import model_of
from mesh_work import distance_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import adjcomp
from adjcomp.ir.summaries import RangeAction

OPTIONS = adjcomp.Options(collective_timeout_seconds=60.0, summaries=True)


class Learned(nn.Module):
    """Layers whose initial states are parameters, and which return their final ones."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inside, self.outside = nn.Embedding(61, width), nn.Linear(width, 61)
        self.decays = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.starts = nn.ParameterList(nn.Parameter(torch.randn(1, width)) for _ in range(3))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x, ends = self.inside(input_ids), []
        for decay, start in zip(self.decays, self.starts, strict=True):
            y, end = adjcomp.ops.linear_scan(decay(x).sigmoid(), x, start.expand(x.shape[0], -1))
            x = x + y
            ends.append(end)
        return self.outside(x).square().mean(), torch.stack(ends)


def _loss(model: nn.Module, ids: Tensor, weighs_ends: bool) -> Tensor:
    if weighs_ends:
        loss, ends = model(ids)
        return loss + ends.square().sum()  # type: ignore[no-any-return]
    found: Any = model(input_ids=ids, labels=ids)
    return found if isinstance(found, Tensor) else found.loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def family(rank: int, name: str, batch: int, length: int, chunk: int) -> tuple[float, float, int]:
    """Worst distance of this rank's gradients to plain autograd's, that of the loss, and the actions that join ranges."""
    torch.manual_seed(0)
    model, ids = Learned().double() if name == "learned" else model_of(name), tokens(batch, length)
    plain = _loss(model, ids, name == "learned")
    plain.backward()
    wanted = _gradients(model)
    model.zero_grad(set_to_none=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("time",))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=chunk, options=OPTIONS)
    loss = _loss(compiled, ids, name == "learned")
    loss.backward()
    found = _gradients(model)
    assert set(found) == set(wanted)
    joins = sum(isinstance(action, RangeAction) for action in compiled.plan.actions)
    return distance_of(found, wanted), abs(loss.item() - plain.item()) / abs(plain.item()), joins


def random_masks(rank: int) -> tuple[float, float]:
    """Joined ranges beside ranges that hand on, with dropout and one seed: the distance of gradients and of losses."""
    spec, call = (
        StackSpec((BlockSpec("selective", dropout=True), BlockSpec("conv", dropout=True)), loss="labels"),
        CallSpec(2, 23, 1, 4),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("time",))
    losses, gradients = [], []
    for summaries in (True, False):
        model, run = build(spec), call_of(spec, call)
        compiled = adjcomp.compile(model, mesh=mesh, chunk=4, options=dataclasses.replace(OPTIONS, summaries=summaries))
        torch.manual_seed(5)
        loss = run(compiled)
        loss.backward()
        losses.append(loss.item())
        gradients.append(_gradients(model))
    return distance_of(*gradients), abs(losses[0] - losses[1])
