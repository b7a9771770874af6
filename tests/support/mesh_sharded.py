"""What ranks do in the tests of models under fully_shard."""

from __future__ import annotations

from dataclasses import dataclass

import mesh_work
import torch
import torch.distributed as dist
from generated import BlockSpec, CallSpec, GeneratedStack, StackSpec, build, call_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import adjcomp
from adjcomp import distributed
from adjcomp.runtime.mesh.sharded import is_sharded
from adjcomp.runtime.mesh.wholes import Wholes

SPEC = StackSpec((BlockSpec("selective"), BlockSpec("ssd", mlp=True)), loss="shifted")
DEEP = StackSpec((BlockSpec("selective"), BlockSpec("diagonal", mlp=True)) * 4, width=8, tied=True, loss="shifted")
STEPS = 2


@dataclass(frozen=True)
class Trained:
    """What a rank found. distance: of gradients to plain autograd's, the worst of all steps; parameters: |p - p_plain| of those
    after the steps; plain_loss, loss: of the original's forward and of the compiled one after them.
    """

    distance: float
    parameters: float
    kept: bool  # gradients and optimizer states have the placements of their parameters
    loss: float
    plain_loss: float
    measured: int
    predicted: int
    budget: int
    parts: int  # bytes of parameters here between steps
    whole: int  # bytes of all parameters


def _sharded(mesh: DeviceMesh, spec: StackSpec = SPEC) -> GeneratedStack:
    model = build(spec)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], over: tuple[str, ...], tight: bool, summaries: bool | None = None
) -> Trained:
    """Two steps of a model sharded over some dimensions of a mesh, beside the same of a plain model on the mean of all data."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, plain = _sharded(mesh[over]), build(SPEC)
    whole = sum(p.numel() * p.element_size() for p in plain.parameters())
    replicas = mesh.get_group("data").size() if "data" in names else 1
    runs = [call_of(SPEC, CallSpec(1, 13, 1 + replica, 4)) for replica in range(replicas)]
    mine = runs[mesh.get_local_rank("data") if "data" in names else 0]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    options = adjcomp.Options(collective_timeout_seconds=60.0, summaries=summaries)
    budget = None
    if tight:
        try:
            mine(adjcomp.compile(model, 64, mesh=mesh, chunk=4, optimizer=optimizers[0], options=options))
        except adjcomp.BudgetError as error:
            budget = error.minimum_bytes
    compiled = adjcomp.compile(model, budget, mesh=mesh, chunk=4, optimizer=optimizers[0], options=options)
    distance, kept = 0.0, True
    for _ in range(STEPS):
        mine(compiled).backward()
        (sum(run(plain) for run in runs) / replicas).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        kept = kept and found.keys() == wanted.keys()
        kept = kept and all(found[name].placements == p.placements for name, p in model.named_parameters())
        distance = max(distance, mesh_work.distance_of({name: g.full_tensor() for name, g in found.items()}, wanted))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stats, state = compiled.stats, distributed.local_state(compiled, optimizers[0])
    kept = kept and all(is_sharded(tensor) for name, tensor in state.items() if not name.endswith(".step"))
    apart = max((p.full_tensor() - q).abs().max().item() for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        losses = mine(compiled).item(), mine(model).item()
    kept = kept and mine(compiled).item() == losses[0]  # also after a plain forward has left parameters gathered
    parts = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    figures = stats.measured_peak_bytes, stats.predicted_peak_bytes, stats.budget_bytes
    return Trained(distance, apart, kept, *losses, *figures, parts, whole)


@dataclass(frozen=True)
class Gathered:
    """What a rank found. distance: of its gradients to plain autograd's; begun: gathers of each layer; parameters: bytes of whole
    parameters that the plan has room for, of all that there are: `whole`.
    """

    distance: float
    begun: dict[int, int]
    parameters: int
    whole: int
    measured: int
    predicted: int
    budget: int


def gathered(rank: int, tight: bool) -> Gathered:
    """A step of a deeper model sharded over time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("time",))
    model, plain, run = _sharded(mesh, DEEP), build(DEEP), call_of(DEEP, CallSpec(1, 26, 1, 3))
    options = adjcomp.Options(collective_timeout_seconds=60.0)
    budget = None
    if tight:
        try:
            run(adjcomp.compile(model, 64, mesh=mesh, chunk=3, options=options))
        except adjcomp.BudgetError as error:
            budget = error.minimum_bytes
    begun: dict[int, int] = {}
    begin = Wholes._begin

    def counted(wholes: Wholes, layer: int) -> None:
        if any(name not in wholes._tickets for name in wholes.names[layer]):
            begun[layer] = begun.get(layer, 0) + 1
        begin(wholes, layer)

    Wholes._begin = counted  # type: ignore[method-assign]
    compiled = adjcomp.compile(model, budget, mesh=mesh, chunk=3, options=options)
    run(compiled).backward()
    run(plain).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    plan, stats = compiled.plan, compiled.stats
    room = max(share.resident_bytes["parameters"] for share in plan.shares)
    whole = sum(p.numel() * p.element_size() for p in plain.parameters())
    figures = stats.measured_peak_bytes, stats.predicted_peak_bytes, stats.budget_bytes
    return Gathered(mesh_work.distance_of(found, wanted), begun, room, whole, *figures)


def refused(rank: int) -> list[str]:
    """Errors of a sharded model without a mesh, under a mesh of layers, and sharded along another dimension than rows."""
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("time",))
    layers = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("layers",))
    columns = build(SPEC)
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda p: Shard(int(p.ndim > 1 and p.shape[1] % 2 == 0)))
    texts = []
    for model, chosen in ((_sharded(mesh), None), (_sharded(mesh), layers), (columns, mesh)):
        try:
            adjcomp.compile(model, mesh=chosen)
        except ValueError as error:
            texts.append(str(error))
    return texts
