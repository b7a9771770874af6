"""A stream that is never whole: truncated backpropagation over pieces, then its perplexity, then generation from its end.

python examples/long_stream.py                        # pieces of 256 tokens, 24 MiB
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp

PIECE = 256  # tokens


def train(model: MambaForCausalLM, ids: torch.Tensor, budget: str, steps: int) -> None:
    """A call with `initial_state=` returns (output, state); the next piece goes on from there. Without `detach` gradients would
    cross all borders, and one backward at the end would be that of the whole stream.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = adjcomp.compile(model, mem_budget=budget, optimizer=optimizer)
    following = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)  # the token after each, across borders, too
    for step in range(steps):
        state, total = None, 0.0
        for piece, labels in zip(ids.split(PIECE, 1), following.split(PIECE, 1), strict=True):
            output, state = compiled(input_ids=piece, labels=piece, shift_labels=labels, initial_state=state)
            output.loss.backward()
            state = state.detach()
            total += output.loss.item()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: loss {total / len(ids.split(PIECE, 1)):.4f}")
    print(f"perplexity of the stream: {compiled.nll(ids).mean().exp().item():.2f}")
    compiled.eval()
    cache = compiled.prefill(ids[:, :-1])
    text = compiled.generate(ids, cache=cache, max_new_tokens=8, do_sample=False, use_cache=True)
    print(f"goes on with {text[0, ids.shape[1] :].tolist()}")


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
