"""Train a byte-level Mamba on long real text within a byte budget, on a CPU.

The text is the source of Python's own standard library, read as one stream of bytes. One step sees 65,536 of them at once; plain
backpropagation through that many needs several gibibytes, and the whole step here stays within 512 MiB.

    python examples/train_long_context.py                    # 65,536 tokens a step, 512 MiB, under three minutes
    python examples/train_long_context.py --million          # 1,048,576 tokens a step
    python examples/train_long_context.py --tokens 131072 --budget 300MiB --steps 5
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore", message=".*falling back to its reference.*")

import torch  # noqa: E402 - the environment above must be set first
from tqdm import tqdm  # noqa: E402
from transformers import MambaConfig, MambaForCausalLM  # noqa: E402

import adjcomp  # noqa: E402
from adjcomp.units import format_bytes  # noqa: E402

SECONDS = 140  # no new step starts after this long


def standard_library(tokens: int) -> torch.Tensor:
    """The first `tokens` bytes of the standard library's sources, in order of their names: uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
        if len(text) >= tokens:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:tokens]


def byte_model() -> MambaForCausalLM:
    """An unmodified transformers Mamba of about a million parameters over bytes."""
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=8, state_size=16, use_cache=False, residual_in_fp32=False
    )
    return MambaForCausalLM(config).train()


def check(model: MambaForCausalLM, text: torch.Tensor) -> None:
    """Compare with plain autograd where that still fits."""
    ids = text[:512].long()[None]
    report = adjcomp.check_gradients(model, {"input_ids": ids, "labels": ids}, chunk=64)
    print(f"gradients against plain autograd at 512 tokens, 8 chunks: largest relative error {report.max_relative_error:.1e}")


def main() -> None:
    """Parse the arguments, check, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens a step")
    parser.add_argument("--budget", default="512MiB", help="everything live during a step, optimizer state included")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--million", action="store_true", help="1,048,576 tokens a step (a few minutes each), 2 steps")
    options = parser.parse_args()
    tokens, steps = (1_048_576, 2) if options.million else (options.tokens, options.steps)
    started = time.perf_counter()

    text = standard_library(tokens * steps)
    model = byte_model()
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters; {len(text):,} bytes of text; {tokens:,} tokens a step within {options.budget}")
    check(model, text)

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    compiled = adjcomp.compile(model, mem_budget=options.budget, optimizer=optimizer)
    losses = []
    with tqdm(total=steps, unit="step", dynamic_ncols=True) as bar:
        for step in range(steps):
            begin = (step * tokens) % max(len(text) - tokens + 1, 1)
            ids = text[begin : begin + tokens].long()[None]
            loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            stats = compiled.stats
            losses.append(loss.item())
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, {tokens / stats.seconds:,.0f} tokens/s, peak {format_bytes(stats.measured_peak_bytes)} "
                f"(predicted {format_bytes(stats.predicted_peak_bytes)}) of {format_bytes(stats.budget_bytes)}"
            )
            bar.update()
            if step == 0:
                tqdm.write(str(compiled.plan))
            if time.perf_counter() - started > SECONDS and not options.million:
                break
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
