"""What ranks do in the tests of meshes. Everything returned is plain data, by rank."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from generated import BlockSpec, CallSpec, StackSpec, build, call_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import adjcomp
from adjcomp.compiled import session_of
from adjcomp.ir.summaries import RangeAction
from adjcomp.ir.transfers import Send, Sum, SumTied
from adjcomp.ir.values import value_bytes

TIMEOUT = 8.0


@dataclass(frozen=True)
class Case:
    """One comparison: a model, a call, the dimensions of the mesh, and whether the budget is nearly the least.

    dimension: one of the mesh's names, or two with a comma between, which then have the sizes `shape`. summaries: as in Options.
    """

    stack: StackSpec
    call: CallSpec
    dimension: str
    tight: bool = False
    shape: tuple[int, int] | None = None
    summaries: bool | None = None


@dataclass(frozen=True)
class Row:
    """What a rank found. distance: the worst |g - g_plain| / (|g_plain| + 1e-3 |all g_plain|) of its gradients."""

    distance: float
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    loss: float
    plain_loss: float
    measured: int
    predicted: int
    budget: int
    live: int  # bytes of parameters that are really here
    sent: tuple[int, int]  # bytes handed to other ranks, and what the plan says
    summed: tuple[int, int]  # bytes of gradients added up over ranks, and what the plan says
    joins: int  # actions of the whole plan that join ranges of time by summaries


def compare_all(rank: int, cases: tuple[Case, ...]) -> list[Row]:
    """Each case against plain autograd."""
    return [_compare(case) for case in cases]


def _plain(model: nn.Module, run: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = run(model)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def distance_of(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The worst |g - g_wanted| / (|g_wanted| + 1e-3 |all g_wanted|)."""
    whole = 1e-3 * sum(g.norm().item() ** 2 for g in wanted.values()) ** 0.5
    return max(((g - wanted[n]).norm().item() / (wanted[n].norm().item() + whole) for n, g in found.items()), default=0.0)


def _compare(case: Case) -> Row:
    model, run = build(case.stack), call_of(case.stack, case.call)
    plain_loss, wanted = _plain(model, run)
    mesh = init_device_mesh("cpu", case.shape or (dist.get_world_size(),), mesh_dim_names=tuple(case.dimension.split(",")))
    options = adjcomp.Options(collective_timeout_seconds=60.0, summaries=case.summaries)
    budget = None
    if case.tight:
        try:
            run(adjcomp.compile(model, 64, mesh=mesh, chunk=case.call.chunk, options=options))
        except adjcomp.BudgetError as error:
            budget = error.minimum_bytes
    compiled = adjcomp.compile(model, budget, mesh=mesh, chunk=case.call.chunk, options=options)
    loss = run(compiled)
    loss.backward()
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    live = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in compiled.parameters()}
    stats = compiled.stats
    return Row(
        distance_of(found, wanted),
        tuple(found),
        tuple(wanted),
        loss.item(),
        plain_loss,
        stats.measured_peak_bytes,
        stats.predicted_peak_bytes,
        stats.budget_bytes,
        sum(live.values()),
        (stats.sent_bytes, planned_sends(compiled.plan, device_of(compiled))),
        (stats.summed_bytes, _planned_sums(compiled.plan, device_of(compiled))),
        sum(isinstance(action, RangeAction) for action in compiled.plan.actions),
    )


def device_of(compiled: nn.Module) -> int:
    """This rank's device in the plans."""
    spread = session_of(compiled).spread
    assert spread is not None
    return spread.place


def planned_sends(plan: adjcomp.Plan, device: int) -> int:
    """Bytes that a device hands to others by its plan."""
    own = [action.value for action in plan.actions if isinstance(action, Send) and action.device == device]
    return sum(value_bytes(plan.costs, value) for value in own)


def _planned_sums(plan: adjcomp.Plan, device: int) -> int:
    own = [action for action in plan.actions if action.device == device]
    tied = sum(plan.costs.ties[action.tie].gradient_bytes for action in own if isinstance(action, SumTied))
    return tied + sum(action.size for action in own if isinstance(action, Sum))


def replicated(rank: int, dimension: str) -> tuple[float, float]:
    """Two replicas of two ranks on different data: the distance to the mean of both gradients, and of the losses."""
    spec, calls = StackSpec((BlockSpec("selective"), BlockSpec("conv")), tied=True, loss="shifted"), (1, 2)
    model = build(spec)
    runs = [call_of(spec, CallSpec(1, 13, seed, 4)) for seed in calls]
    plain = [_plain(model, run) for run in runs]
    wanted = {name: sum(grads[name] for _, grads in plain) / len(plain) for name in plain[0][1]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", dimension))
    mine = mesh.get_local_rank("data")
    compiled = adjcomp.compile(model, mesh=mesh, chunk=4, options=adjcomp.Options(collective_timeout_seconds=60.0))
    loss = runs[mine](compiled)
    loss.backward()
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    return distance_of(found, wanted), abs(loss.item() - plain[mine][0])


def tied_apart(rank: int) -> tuple[float, int]:
    """Three stages, of which the outer two share the vocabulary's matrix and the upper two a block: the distance of gradients,
    and how many sets of ranks add up together.
    """
    spec = StackSpec((BlockSpec("diagonal", mlp=True),) * 3, tied=True, loss="shifted")
    model, run = build(spec), call_of(spec, CallSpec(1, 24, 1, 3))
    model.layers[2] = model.layers[1]
    _, wanted = _plain(model, run)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("layers",))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=3, options=adjcomp.Options(collective_timeout_seconds=60.0))
    run(compiled).backward()
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    places = [(action.tie, action.device) for action in compiled.plan.actions if isinstance(action, SumTied)]
    sets = {frozenset(device for tie, device in places if tie == own) for own, _ in places}
    return distance_of(found, wanted), len(sets)


def mismatched(rank: int) -> list[str]:
    """Calls that differ on rank 1: in length, in the seed, in a dtype, in that it raises; the error this rank gets from each."""
    spec = StackSpec((BlockSpec("diagonal", dropout=True),), loss="mean")
    model = build(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("time",))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=3, options=adjcomp.Options(collective_timeout_seconds=60.0))
    odd = rank == 1
    texts = [_error_of(compiled, 6 if odd else 5, seed=0), _error_of(compiled, 5, seed=rank)]
    texts.append(_error_of(compiled, 0 if odd else 5, seed=0))
    if odd:
        model.float()
    texts.append(_error_of(compiled, 5, seed=0))
    model.double()
    return [*texts, _error_of(compiled, 5, seed=0)]


def _error_of(compiled: nn.Module, length: int, seed: int) -> str:
    torch.manual_seed(seed)
    try:
        compiled(torch.zeros(1, length, dtype=torch.int64))
    except (adjcomp.RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(
    rank: int,
    spec: StackSpec,
    call: CallSpec,
    dimension: str,
    shape: tuple[int, ...],
    signal_number: int,
    at: int,
    sharded: bool = False,
) -> tuple[str, bool]:
    """Rank 1 fails at its action number `at`; the others return their error, and whether a gradient is set.

    dimension, shape: of the mesh; several names with commas between. sharded: its parameters, over all ranks.
    """
    from adjcomp.runtime.executor import Step

    model, run = build(spec), call_of(spec, call)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(dimension.split(",")))
    if sharded:
        fully_shard(model, mesh=mesh)
    options = adjcomp.Options(collective_timeout_seconds=TIMEOUT)
    compiled = adjcomp.compile(model, mesh=mesh, chunk=call.chunk, options=options)
    plain_run, count = Step._run, 0

    def counted(step: Step, action: Any) -> None:
        nonlocal count
        count += 1
        if rank == 1 and count == at:
            _fail(signal_number)
        plain_run(step, action)

    Step._run = counted  # type: ignore[method-assign]
    try:
        run(compiled).backward()
    except adjcomp.RankError as error:
        return str(error), any(p.grad is not None for p in model.parameters())
    return "no error", False


def _fail(signal_number: int) -> None:
    if signal_number == 0:
        raise ArithmeticError("made to fail")
    os.kill(os.getpid(), signal.Signals(signal_number))
