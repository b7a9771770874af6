"""Linear recurrent units: a diagonal recurrence with complex poles, which can oscillate as well as decay.

`adjcomp.ops.linear_scan` takes complex tensors as it takes real ones. The task: at every step of a long sequence whose tone
changes now and then, tell which tone it is.

    python examples/complex_lru.py                        # 4,096 steps a sequence, 24 MiB
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import adjcomp
from adjcomp.units import format_bytes

TONES, PIECE = 6, 256  # classes, steps of one tone


class LRU(nn.Module):
    """h[t] = λ h[t-1] + γ B u[t], y = Re(C h), with |λ| = exp(-exp(ν)) < 1 and γ = sqrt(1 - |λ|²)."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.nu = nn.Parameter(torch.linspace(-4.0, -1.0, states))
        self.theta = nn.Parameter(torch.linspace(0.0, math.pi, states))
        self.b = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat) / width**0.5)
        self.c = nn.Parameter(torch.randn(states, width, dtype=torch.cfloat) / states**0.5)

    def forward(self, u_btd: Tensor) -> Tensor:
        poles = torch.exp(torch.complex(-torch.exp(self.nu), self.theta))
        driven = torch.sqrt(1 - poles.abs() ** 2) * (u_btd.to(poles.dtype) @ self.b)
        h, _ = adjcomp.ops.linear_scan(poles.expand_as(driven), driven)
        return (h @ self.c).real


class Block(nn.Module):
    """x + W gelu(LRU(norm(x)))."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(width), LRU(width, states), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.gelu(self.mixer(self.norm(x))))


class Classifier(nn.Module):
    """A float sequence (B, T, 1) and labels (B, T) in, the mean cross entropy out."""

    def __init__(self, width: int = 16, states: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(1, width), nn.Linear(width, TONES)
        self.layers = nn.ModuleList(Block(width, states) for _ in range(layers))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def tones(steps: int) -> tuple[Tensor, Tensor]:
    """A sequence (1, steps, 1) of tones of PIECE steps each, and the class of every step (1, steps)."""
    classes = torch.randint(0, TONES, (1, -(-steps // PIECE))).repeat_interleave(PIECE, dim=1)[:, :steps]
    phase = torch.cumsum(math.pi * (classes + 0.5) / TONES, dim=1)
    return (torch.sin(phase) + 0.3 * torch.randn(1, steps)).unsqueeze(-1), classes


def main(words: Sequence[str] | None = None) -> None:
    """Check the gradients on a short piece, then train on the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--budget", default="24MiB")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    model = Classifier()
    sound, classes = tones(arguments.tokens)

    report = adjcomp.check_gradients(model, (sound[:, :200], classes[:, :200]), chunk=64)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")

    compiled = adjcomp.compile(model, mem_budget=arguments.budget, optimizer="adam")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        loss = compiled(sound, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"step {step}: loss {loss.item():.4f}, peak {format_bytes(compiled.stats.measured_peak_bytes)} of {arguments.budget}"
        )


if __name__ == "__main__":
    main()
