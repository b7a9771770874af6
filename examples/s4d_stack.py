"""A stack of diagonal state space layers of your own (S4D with real poles), trained on one long sequence within a budget.

Every channel has N states with decays of its own; `adjcomp.ops.linear_scan` runs them. The task: from noise that is 1 or -1,
recover what came in `LAG` steps ago. Nothing in the model knows about budgets.

    python examples/s4d_stack.py                          # 4,096 steps a sequence, 12 MiB
    python examples/s4d_stack.py --tokens 131072 --budget 64MiB
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import adjcomp
from adjcomp.units import format_bytes

LAG = 2


class S4D(nn.Module):
    """h[t] = a h[t-1] + b u[t] with N states a channel, y = Σ c h + d u."""

    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(-3.0, 1.0, states).repeat(width, 1))  # time constants from 0.4 to 20 steps
        self.b = nn.Parameter(torch.randn(width, states) / states**0.5)
        self.c = nn.Parameter(torch.randn(width, states) / states**0.5)
        self.d = nn.Parameter(torch.zeros(width))

    def forward(self, u_btd: Tensor) -> Tensor:
        driven = u_btd.unsqueeze(-1) * self.b  # (B, T, D, N)
        decay = torch.exp(-torch.exp(self.log_rate)).expand_as(driven)
        h, _ = adjcomp.ops.linear_scan(decay, driven)
        return (h * self.c).sum(-1) + self.d * u_btd


class Block(nn.Module):
    """x + W gelu(S4D(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(width), S4D(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.gelu(self.mixer(self.norm(x))))


class Stack(nn.Module):
    """A float sequence (B, T, 1) in, one out."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(1, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def main(words: Sequence[str] | None = None) -> None:
    """Check the gradients on a short piece, then train on the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = Stack()
    noise = torch.randint(0, 2, (1, arguments.tokens, 1)) * 2.0 - 1.0
    target = torch.roll(noise, LAG, dims=1)

    report = adjcomp.check_gradients(model, (noise[:, :200],), chunk=64)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")

    compiled = adjcomp.compile(model, mem_budget=arguments.budget, optimizer="adam")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        loss = (compiled(noise)[:, LAG:] - target[:, LAG:]).square().mean()  # any loss of the outputs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"step {step}: loss {loss.item():.4f}, peak {format_bytes(compiled.stats.measured_peak_bytes)} of {arguments.budget}"
        )


if __name__ == "__main__":
    main()
