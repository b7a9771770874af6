"""LoRA adapters by PEFT on a compiled model: the base stays frozen, and its gradients are never planned.

python examples/peft_lora.py                          # 1,024 tokens a row, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from peft import LoraConfig, get_peft_model
from transformers import MambaConfig, MambaForCausalLM

import adjcomp


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """Adapt first, then compile the adapted model."""
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["in_proj", "x_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    compiled = adjcomp.compile(adapted, mem_budget=budget, optimizer=optimizer)
    for step in range(steps):
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, peak {compiled.stats.measured_peak_bytes / 2**20:.1f} MiB of {budget}")
    compiled.save_pretrained("build/adapters")


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
