"""One long sequence on several ranks: layers or time spread over them, checkpoints that a restart resumes from.

torchrun --nproc-per-node 2 examples/train_on_ranks.py --placement time
torchrun --nproc-per-node 2 examples/train_on_ranks.py --placement layers --checkpoints build/run1 --steps 6
torchrun --nproc-per-node 4 examples/train_on_ranks.py --placement layers,time --shape 2,2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MambaConfig, MambaForCausalLM

import adjcomp
from adjcomp import distributed


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", default="time", help="layers, time, auto, or layers,time")
    parser.add_argument("--shape", help="ranks along each of several dimensions: 2,2")
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--budget", default="64MiB", help="of each rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see")
    return parser.parse_args(words)


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 without any."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def save(folder: Path, step: int, compiled: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes what it has; the plan goes along, so that a restart computes the very same numbers."""
    dcp.save(distributed.local_state(compiled, optimizer), checkpoint_id=folder / str(step))
    if dist.get_rank() == 0:
        (folder / "plan.json").write_text(compiled.plan.to_json())


def main(words: Sequence[str] | None = None) -> None:
    """Train; with --checkpoints, from the newest one on."""
    arguments = arguments_of(words)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = dist.get_world_size()
    shape = tuple(int(n) for n in arguments.shape.split(",")) if arguments.shape else (ranks,)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", shape, mesh_dim_names=tuple(arguments.placement.split(",")))

    torch.manual_seed(0)  # the same weights everywhere; a rank frees what its plan doesn't need
    config = MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=4, use_cache=False)
    model = MambaForCausalLM(config).to("cuda" if on_gpu else "cpu")
    text = torch.randint(0, 256, (1, 64)).repeat(1, arguments.tokens // 64 + 1)[:, : arguments.tokens]  # a phrase, repeated

    folder = arguments.checkpoints
    known = None if folder is None else folder / "plan.json"
    plan = adjcomp.Plan.from_json(known.read_text()) if known is not None and known.exists() else None
    if plan is not None and len(plan.shares) != ranks:
        plan = None  # another number of ranks: plan again
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = adjcomp.compile(model, arguments.budget, optimizer=optimizer, mesh=mesh, plan=plan)
    distributed.place(compiled, seq_len=arguments.tokens)
    first = 0 if folder is None else newest(folder)
    if first:
        dcp.load(distributed.local_state(compiled, optimizer), checkpoint_id=folder / str(first))

    spans = distributed.token_ranges(compiled, seq_len=arguments.tokens)
    ids = distributed.read_tokens(text, spans).to(model.device)
    for step in range(first + 1, arguments.steps + 1):
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = compiled.stats.measured_peak_bytes / 2**20
        read = sum(len(span) for span in spans)
        print(f"step {step}, rank {dist.get_rank()}: loss {loss.item():.6f}, {read} tokens read, peak {peak:.1f} MiB")
        if folder is not None:
            save(folder, step, compiled, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
