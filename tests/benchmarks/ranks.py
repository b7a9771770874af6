"""Speed-up over ranks of one thread each: a step of a Mamba stack under a tight budget, on one rank and on several.

python tests/benchmarks/ranks.py --ranks 2 --placement layers --tokens 65536

With --plan FILE a first run plans and writes the file, and a second one runs it: planning needs no quiet machine, timing does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import adjcomp


def model_of(width: int, layers: int) -> torch.nn.Module:
    """A transformers Mamba, vocabulary 1,000."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=1000, hidden_size=width, num_hidden_layers=layers, use_cache=False)
    return transformers.MambaForCausalLM(config).train()


def least_budget(model: torch.nn.Module, mesh: DeviceMesh | None, arguments: argparse.Namespace) -> int:
    """The least budget that can be planned, times the factor."""
    try:
        adjcomp.compile(model, 1 << 20, mesh=mesh).plan_for(seq_len=arguments.tokens)
    except adjcomp.BudgetError as error:
        return int(error.minimum_bytes * arguments.factor)
    return 1 << 20


def measure(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    """Seconds of the fastest of the steps on this rank, with what the plan said."""
    torch.set_num_threads(1)
    mesh = None
    if arguments.ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
        grid = arguments.placement == "grid"
        shape = (1, arguments.ranks) if grid else (arguments.ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("layers", "time") if grid else (arguments.placement,))
    model = model_of(arguments.width, arguments.layers)
    ids = torch.randint(0, 1000, (1, arguments.tokens), generator=torch.Generator().manual_seed(1))
    saved = arguments.plan if arguments.plan is not None and arguments.plan.exists() else None
    plan = None if saved is None else adjcomp.Plan.from_json(saved.read_text())
    budget = int(arguments.budget_mib * 2**20) if plan is None else max(plan.budget_bytes.values())
    if not budget:
        budget = least_budget(model, mesh, arguments)
    compiled = adjcomp.compile(model, budget, mesh=mesh, plan=plan)
    plan = compiled.plan_for(seq_len=arguments.tokens)
    if arguments.plan is not None and saved is None:
        if rank == 0:
            arguments.plan.write_text(plan.to_json())
        arguments.steps = 0
    seconds = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        compiled(input_ids=ids, labels=ids).loss.backward()
        seconds.append(round(time.perf_counter() - started, 2))
        model.zero_grad()
    results.put(
        {
            "rank": rank,
            "seconds": seconds,
            "planned": round(plan.seconds, 2),
            "chunk": plan.chunk,
            "budget_mib": round(budget / 2**20, 1),
            "peak_mib": round(compiled.stats.measured_peak_bytes / 2**20, 1) if seconds else None,
        }
    )


def collect(jobs: list[Any], results: Any) -> None:
    """Print a line of JSON for each rank. SystemExit where one ends without: the others would wait for it."""
    left = len(jobs)
    while left:
        try:
            print(json.dumps(results.get(timeout=1.0)), flush=True)
            left -= 1
        except queue.Empty:
            failed = [f"rank {rank}: exit code {job.exitcode}" for rank, job in enumerate(jobs) if job.exitcode]
            if failed:
                for job in jobs:
                    job.terminate()
                raise SystemExit(", ".join(failed)) from None


def main() -> None:
    """Run the ranks, print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--placement", choices=["layers", "time", "grid"], default="layers", help="grid: one stage")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--factor", type=float, default=1.3, help="budget over the least")
    parser.add_argument("--budget-mib", type=float, default=0.0, help="of each rank, in the place of the factor")
    parser.add_argument("--plan", type=Path, help="a file: written where it doesn't exist, else run")
    parser.add_argument("--steps", type=int, default=2, help="the first one warms up")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    jobs = [context.Process(target=measure, args=(rank, arguments, store.port, results)) for rank in range(arguments.ranks)]
    for job in jobs:
        job.start()
    collect(jobs, results)
    for job in jobs:
        job.join()


if __name__ == "__main__":
    main()
