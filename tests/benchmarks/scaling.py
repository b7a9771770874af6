"""What the planner expects of many GPUs: efficiency of each placement, as the rows of the table in docs/scaling.md.

python tests/benchmarks/scaling.py --devices 8 16 32 64 --tokens 1048576 4194304 16777216

Mamba-1.4B shapes on the meta device, bfloat16, AdamW, all of the devices' memory; nodes of 8. Efficiency is the time on one
device over (devices x time); the planner's own seconds are those of this computer.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp

PER_NODE = 8


def model_of(layers: int) -> torch.nn.Module:
    """Mamba of width 2,048 without memory."""
    with torch.device("meta"):
        config = MambaConfig(vocab_size=50280, hidden_size=2048, num_hidden_layers=layers, state_size=16, use_cache=False)
        return MambaForCausalLM(config).to(torch.bfloat16)


def machine_of(profile: str, devices: int) -> str:
    """The name of a machine in nodes of 8."""
    return f"{profile}:{devices}" if devices <= PER_NODE else f"{profile}:{devices // PER_NODE}x{PER_NODE}"


def shape_of(plan: adjcomp.Plan) -> str:
    """Stages and lanes, from who adds up gradients with whom."""
    sums = [action for action in plan.actions if type(action).__name__ == "Sum"]
    lanes = len({action.device for action in sums if action.layer == sums[0].layer}) if sums else 1
    return f"{len(plan.shares) // lanes} x {lanes}"


def row(model: torch.nn.Module, profile: str, devices: int, tokens: int, placement: str, alone: float) -> str:
    """A row of the table; what went wrong where there is no plan."""
    start = time.perf_counter()
    name = f"| {tokens:,} | {devices} | {placement} "
    try:
        plan = adjcomp.plan(
            model,
            seq_len=tokens,
            machine=machine_of(profile, devices),
            optimizer="adamw",
            options=adjcomp.Options(placement=placement),
        )
    except adjcomp.BudgetError as error:
        return f"{name}| doesn't fit: {error.minimum_bytes / 2**30:.0f} GiB |||||||"
    took = time.perf_counter() - start
    shape = f" {shape_of(plan)}" if placement == "grid" else ""
    if any(type(action).__name__ == "Summarize" for action in plan.actions):
        shape = "(joined) "
    peak = max(plan.peak_bytes.values()) / 2**30
    return (
        f"{name}{shape}| {plan.seconds:.3g} | {alone / devices / plan.seconds:.0%} | {plan.gap:.1%} | {plan.chunk:,} "
        f"| {peak:.1f} GiB | {took:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 20, 1 << 22, 1 << 24])
    parser.add_argument("--placements", nargs="+", default=["layers", "time", "grid"])
    parser.add_argument("--profile", default="h100-80gb")
    parser.add_argument("--layers", type=int, default=48)
    arguments = parser.parse_args()
    model = model_of(arguments.layers)
    print("| tokens | devices | placement | seconds | efficiency | gap | chunk | largest peak | seconds to plan |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for tokens in arguments.tokens:
        alone = adjcomp.plan(model, seq_len=tokens, machine=arguments.profile, optimizer="adamw").seconds
        for devices in arguments.devices:
            for placement in arguments.placements:
                print(row(model, arguments.profile, devices, tokens, placement, alone), flush=True)


if __name__ == "__main__":
    main()
