"""The training loop you have, with one line more: a transformers Mamba on token ids, the loop in ten lines.

python examples/own_loop.py                           # 2,048 tokens a step, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """Ten lines. The optimizer, gradient clipping and checkpoints see the model's own parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = adjcomp.compile(model, mem_budget=budget, optimizer=optimizer)
    for step in range(steps):
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stats = compiled.stats
        print(f"step {step}: loss {loss.item():.4f}, peak {stats.measured_peak_bytes / 2**20:.1f} MiB of {budget}")


def main(words: Sequence[str] | None = None) -> None:
    """Check the gradients on a short piece, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--budget", default="24MiB")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, use_cache=False))
    ids = torch.randint(0, 256, (1, 64)).repeat(1, arguments.tokens // 64 + 1)[:, : arguments.tokens]  # a phrase, over and over
    short = ids[:, :64]
    report = adjcomp.check_gradients(model, {"input_ids": short, "labels": short}, chunk=32)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")
    train(model, ids, arguments.budget, arguments.steps)


if __name__ == "__main__":
    main()
