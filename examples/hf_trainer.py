"""transformers' Trainer on a compiled model: accumulation and evaluation, as with any other model.

python examples/hf_trainer.py                         # 1,024 tokens a row, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import MambaConfig, MambaForCausalLM, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import adjcomp


class Report(TrainerCallback):
    """Prints the loss of every step."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: dict[str, float]) -> None:
        logs = given.get("logs", {})
        if "loss" in logs:
            print(f"step {state.global_step - 1}: loss {float(logs['loss']):.4f}")


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """The view goes where the model went. The optimizer is Trainer's own, so its kind is named for the budget."""
    rows = [{"input_ids": ids[0], "labels": ids[0]}] * 8
    settings = TrainingArguments(
        output_dir="build/trainer",
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=1,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    compiled = adjcomp.compile(model, mem_budget=budget, optimizer="adamw")
    trainer = Trainer(model=compiled, args=settings, train_dataset=rows, eval_dataset=rows, callbacks=[Report()])
    trainer.train()
    print(f"evaluated without logits: loss {trainer.evaluate()['eval_loss']:.4f}")


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
