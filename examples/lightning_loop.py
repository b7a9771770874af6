"""Lightning around a compiled model: compile it in the module's __init__, the rest is as ever (pip install lightning).

python examples/lightning_loop.py                     # 1,024 tokens a row, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import lightning
import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp


class Trained(lightning.LightningModule):
    """The compiled view is a submodule like any other; its parameters are the model's own."""

    def __init__(self, model: MambaForCausalLM, budget: str) -> None:
        super().__init__()
        self.model = adjcomp.compile(model, mem_budget=budget, optimizer="adamw")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """One step; printed here, as no logger is set up."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        print(f"step {index}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, which the budget knows by name."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """Lightning's Trainer with clipping, and nothing written to disk."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, gradient_clip_val=1.0, devices=1, **quiet)
    trainer.fit(Trained(model, budget), torch.utils.data.DataLoader(ids.repeat(steps, 1), batch_size=1))


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
