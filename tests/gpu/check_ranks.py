"""Gradients of plans on several GPUs against plain autograd on one: run by torchrun, prints a line for each placement.

torchrun --nproc-per-node 2 tests/gpu/check_ranks.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import adjcomp


def model_of() -> torch.nn.Module:
    """A Mamba of four layers on this rank's GPU."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=512, hidden_size=256, num_hidden_layers=4, use_cache=False)
    return transformers.MambaForCausalLM(config).train().cuda()


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest |g - g_plain| / (|g_plain| + 1e-3 |all g_plain|)."""
    whole = 1e-3 * sum(g.norm().item() ** 2 for g in wanted.values()) ** 0.5
    return max(((g - wanted[n]).norm().item() / (wanted[n].norm().item() + whole) for n, g in found.items()), default=0.0)


def main() -> None:
    """Compare, by layers and by time; exits with an error where a gradient is off."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ids = torch.randint(0, 512, (1, 2_000), generator=torch.Generator().manual_seed(1)).cuda()
    plain = model_of()
    adjcomp.compile(plain)(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    bad = 0
    for placement in ("layers", "time"):
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=(placement,))
        compiled = adjcomp.compile(model_of(), mesh=mesh, chunk=256)
        compiled(input_ids=ids, labels=ids).loss.backward()
        found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
        distance = worst(found, wanted)
        bad += distance > 1e-4
        print(f"{placement}, rank {dist.get_rank()}: worst {distance:.1e}, peak {compiled.stats.measured_peak_bytes}", flush=True)
    dist.destroy_process_group()
    if bad:
        raise SystemExit("a gradient is off")


if __name__ == "__main__":
    main()
