"""Plans on several ranks against one: gradients, peaks and bytes sent, a line for each rank and placement. Run by torchrun.

torchrun --nproc-per-node 8 tests/gpu/check_ranks.py               # one GPU a rank (LOCAL_RANK), NCCL
torchrun --nproc-per-node 2 tests/gpu/check_ranks.py --cpu         # the same on Gloo, small
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import adjcomp
from adjcomp.compiled import session_of
from adjcomp.ir.transfers import Send
from adjcomp.ir.values import value_bytes

CLOSE = 1e-4  # largest |g - g_one| / (|g_one| + 1e-3 |all g_one|), float32 on any device


@dataclass(frozen=True)
class Size:
    """What is trained: one sequence of `tokens`, in chunks, and where."""

    device: str
    width: int
    tokens: int
    chunk: int


def model_of(size: Size) -> torch.nn.Module:
    """A Mamba of four layers on this rank's device, with the same weights everywhere."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=512, hidden_size=size.width, num_hidden_layers=4, use_cache=False)
    return transformers.MambaForCausalLM(config).train().to(size.device)


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest |g - g_one| / (|g_one| + 1e-3 |all g_one|)."""
    whole = 1e-3 * sum(g.norm().item() ** 2 for g in wanted.values()) ** 0.5
    return max(((g - wanted[n]).norm().item() / (wanted[n].norm().item() + whole) for n, g in found.items()), default=0.0)


def planned_sends(compiled: torch.nn.Module) -> int:
    """Bytes that this rank hands to others by the plan."""
    spread, plan = session_of(compiled).spread, compiled.plan
    own = [a.value for a in plan.actions if isinstance(a, Send) and spread is not None and a.device == spread.place]
    return sum(value_bytes(plan.costs, value) for value in own)


def least_budget(model: torch.nn.Module, mesh: DeviceMesh, size: Size) -> int:
    """The least budget of a rank."""
    try:
        adjcomp.compile(model, 1 << 10, mesh=mesh, chunk=size.chunk).plan_for(seq_len=size.tokens)
    except adjcomp.BudgetError as error:
        return error.minimum_bytes
    return 1 << 10


def check(what: str, mesh: DeviceMesh, size: Size, wanted: dict[str, torch.Tensor], ids: torch.Tensor, *, sharded: bool) -> bool:
    """One step on a mesh; whether gradients, peak and bytes are as they should be on this rank."""
    model = model_of(size)
    if sharded:
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    budget = int(1.3 * least_budget(model, mesh, size))
    compiled = adjcomp.compile(model, budget, mesh=mesh, chunk=size.chunk)
    compiled(input_ids=ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    distance = worst({name: g.full_tensor() if sharded else g for name, g in grads.items()}, wanted)
    stats, planned = compiled.stats, planned_sends(compiled)
    good = distance <= CLOSE and stats.measured_peak_bytes <= stats.budget_bytes and stats.sent_bytes == planned
    print(
        f"{what}, rank {dist.get_rank()}: {'good' if good else 'BAD'}: gradients off by {distance:.1e}, peak "
        f"{stats.measured_peak_bytes:,} of {stats.budget_bytes:,}, sent {stats.sent_bytes:,} bytes of {planned:,} planned, "
        f"{stats.seconds:.2f} s",
        flush=True,
    )
    return good


def main() -> None:
    """Every placement; exits with an error where something is off on any rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="Gloo and a small model")
    on_cpu = parser.parse_args().cpu
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind, size = ("cpu", Size("cpu", 32, 200, 16)) if on_cpu else ("cuda", Size("cuda", 256, 8_000, 256))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    ranks = dist.get_world_size()
    ids = torch.randint(0, 512, (1, size.tokens), generator=torch.Generator().manual_seed(1)).to(size.device)
    one = model_of(size)
    adjcomp.compile(one)(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}
    meshes = [("layers", (ranks,)), ("time", (ranks,)), ("time, sharded", (ranks,))]
    if ranks % 2 == 0:
        meshes.append(("layers,time", (2, ranks // 2)))
    good = True
    for what, shape in meshes:
        names = tuple(what.removesuffix(", sharded").split(","))
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        good = check(what, mesh, size, wanted, ids, sharded=what.endswith("sharded")) and good
        dist.barrier()
    dist.destroy_process_group()
    if not good:
        raise SystemExit("something is off: see the lines above")


if __name__ == "__main__":
    main()
