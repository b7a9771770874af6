"""Accelerate around a compiled model: prepare it as ever, in bfloat16 by autocast.

python examples/accelerate_loop.py                    # 1,024 tokens a row, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from accelerate import Accelerator
from transformers import MambaConfig, MambaForCausalLM

import adjcomp


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """Compile before prepare: Accelerate wraps the view's forward, the original keeps its own."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = adjcomp.compile(model.to(accelerator.device), mem_budget=budget, optimizer=optimizer)
    prepared, stepper = accelerator.prepare(compiled, optimizer)
    ids = ids.to(accelerator.device)
    for step in range(steps):
        loss = prepared(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, peak {compiled.stats.measured_peak_bytes / 2**20:.1f} MiB of {budget}")


def main(words: Sequence[str] | None = None) -> None:
    """Check the gradients on a short piece, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--budget", default="24MiB")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, use_cache=False))
    ids = torch.randint(0, 256, (1, 64)).repeat(1, arguments.tokens // 64 + 1)[:, : arguments.tokens]  # a phrase, over and over
    short = ids[:, :48]
    report = adjcomp.check_gradients(model, {"input_ids": short, "labels": short}, chunk=32)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")
    train(model, ids, arguments.budget, arguments.steps)


if __name__ == "__main__":
    main()
