"""A selective stack whose transition is a full matrix made from the input: h[t] = A(x[t]) h[t-1] + B(x[t]).

This is the unstructured case of adjoint sharding: A[t] is N × N at every step, `adjcomp.ops.dense_scan` runs the recurrence. The
task: a ball lies under one of three cups. One symbol puts it back under the first, the others swap cups; at every step, tell
where the ball is. No diagonal recurrence can follow that, as swaps don't commute.

    python examples/dense_selective.py                    # 4,096 steps a sequence, 12 MiB
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import adjcomp
from adjcomp.units import format_bytes

CUPS = 3
SWAPS = ((0, 0, 0), (1, 0, 2), (0, 2, 1), (2, 1, 0))  # where the ball goes from cup 0, 1, 2; the first puts it back


class DenseSelective(nn.Module):
    """y[t] = W (c(x[t]) · h[t]). The rows of A(x[t]) are positive and sum to less than one, so that the state can't grow."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.states = states
        self.transition, self.forget = nn.Linear(width, states * states), nn.Linear(width, states)
        self.inputs, self.outputs = nn.Linear(width, states), nn.Linear(width, states)
        self.project = nn.Linear(states, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        gate = torch.sigmoid(self.forget(x_btd))
        mix = self.transition(x_btd).unflatten(-1, (self.states, self.states)).softmax(-1)  # (B, T, N, N)
        h, _ = adjcomp.ops.dense_scan(gate.unsqueeze(-1) * mix, (1 - gate) * self.inputs(x_btd))  # (B, T, N)
        return self.project(self.outputs(x_btd) * h)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x)), as one residual layer."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), DenseSelective(width, states)
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.down(nn.functional.silu(self.up(self.after(x))))


class Tracker(nn.Module):
    """Symbols (B, T) and labels (B, T) in, the mean cross entropy out."""

    def __init__(self, width: int = 24, states: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(len(SWAPS), width), nn.Linear(width, CUPS)
        self.layers = nn.ModuleList(Block(width, states) for _ in range(layers))

    def forward(self, symbols: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(symbols)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def game(steps: int) -> tuple[Tensor, Tensor]:
    """Symbols and where the ball is after each: (1, steps) both."""
    symbols = torch.randint(0, len(SWAPS), (steps,))
    place, places = 0, []
    for symbol in symbols.tolist():
        place = SWAPS[symbol][place]
        places.append(place)
    return symbols[None], torch.tensor(places)[None]


def main(words: Sequence[str] | None = None) -> None:
    """Check the gradients on a short piece, then train on the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    symbols, places = game(arguments.tokens)
    model = Tracker()

    report = adjcomp.check_gradients(model, (symbols[:, :200], places[:, :200]), chunk=64)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")

    compiled = adjcomp.compile(model, mem_budget=arguments.budget, optimizer="adam")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        loss = compiled(symbols, places)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"step {step}: loss {loss.item():.4f}, peak {format_bytes(compiled.stats.measured_peak_bytes)} of {arguments.budget}"
        )


if __name__ == "__main__":
    main()
