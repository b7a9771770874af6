"""The model of adjoint sharding (arXiv 2501.00692): selective state space layers in a residual stack, three kinds of transition.

In layer k, with ŷ = RMSNorm(y), the networks 𝒜, ℬ and 𝒞 are one linear map each:
    A[t] = 𝒜(ŷ[t]),  B[t] = ℬ(ŷ[t]),  C[t] = 𝒞(ŷ[t]),  h[t] = A[t] h[t-1] + B[t] ŷ[t],  y[t] += C[t] h[t].
A[t] is a matrix ("unstructured"), N numbers ("diagonal"), or one number ("scalar"). An unstructured layer has one state of N
numbers and matrices B (N × P) and C (P × N); the others have N states for each of the P channels, which share A, B and C.

    python examples/paper_model.py                                     # diagonal, 8,192 bytes of text a step, 64 MiB
    python examples/paper_model.py --structure scalar --coupling residual --window 64
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import adjcomp
from adjcomp.units import format_bytes

STRUCTURES = ("unstructured", "diagonal", "scalar")
VOCABULARY = 256  # bytes


class SelectiveLayer(nn.Module):
    """C[t] h[t] of the norm of its input: (B, T, P) in and out. Transitions are kept below one, so that states can't grow."""

    def __init__(self, structure: str, states: int, width: int) -> None:
        super().__init__()
        self.structure, self.states, self.width = structure, states, width
        self.norm = nn.RMSNorm(width)
        transition = {"unstructured": states * states, "diagonal": states, "scalar": 1}[structure]
        reader = states * width if structure == "unstructured" else states
        self.A, self.B, self.C = (nn.Linear(width, size) for size in (transition, reader, reader))

    def forward(self, y: Tensor) -> Tensor:
        x = self.norm(y)
        return self.unstructured(x) if self.structure == "unstructured" else self.elementwise(x)

    def unstructured(self, x: Tensor) -> Tensor:
        """h: (B, T, N)."""
        A = torch.tanh(self.A(x).unflatten(-1, (self.states, self.states))) / self.states**0.5
        b = (self.B(x).unflatten(-1, (self.states, self.width)) * x.unsqueeze(-2)).sum(-1) / self.width
        h, _ = adjcomp.ops.dense_scan(A, b)
        return (self.C(x).unflatten(-1, (self.width, self.states)) * h.unsqueeze(-2)).sum(-1)

    def decays(self, x: Tensor) -> Tensor:
        """A[t]: (B, T, N) or (B, T, 1), between zero and one; most of it near one, so that layers remember."""
        return torch.sigmoid(self.A(x) + 2.0)

    def elementwise(self, x: Tensor) -> Tensor:
        """h: (B, T, N, P)."""
        b = self.B(x).unsqueeze(-1) * x.unsqueeze(-2)
        h, _ = adjcomp.ops.linear_scan(self.decays(x).unsqueeze(-1).expand_as(b), b)
        return (self.C(x).unsqueeze(-1) * h).sum(-2) / self.states


class PaperModel(nn.Module):
    """Token ids (B, T) and labels (B, T) to the mean cross entropy; K layers, then a norm and the head Ω."""

    def __init__(
        self, structure: str = "diagonal", states: int = 8, width: int = 64, layers: int = 4, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        if structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, not {structure!r}")
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(SelectiveLayer(structure, states, width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        y = self.embed(ids)
        for layer in self.layers:
            y = y + layer(y)
        return nn.functional.cross_entropy(self.head(self.norm(y)).flatten(0, 1), labels.flatten())


def text(tokens: int) -> Tensor:
    """The first bytes of the standard library's sources: (tokens,) int64."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= tokens:
            break
    return torch.frombuffer(found, dtype=torch.uint8)[:tokens].long()


def main(words: Sequence[str] | None = None) -> None:
    """Compare the gradient with plain autograd's, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--structure", choices=STRUCTURES, default="diagonal")
    parser.add_argument("--coupling", choices=("exact", "residual"), default="exact")
    parser.add_argument("--window", type=int, help="truncate every adjoint to this many steps")
    parser.add_argument("--states", type=int, default=8)
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore", adjcomp.ApproximationWarning)
    torch.manual_seed(0)
    model = PaperModel(arguments.structure, arguments.states)
    data = text(arguments.tokens * arguments.steps + 1)
    form = {"coupling": arguments.coupling, "adjoint_window": arguments.window}

    report = adjcomp.check_gradients(model, (data[None, :200], data[None, 1:201]), chunk=64, **form)
    print(f"gradients against plain autograd: largest relative error {report.max_relative_error:.1e}")

    compiled = adjcomp.compile(model, mem_budget=arguments.budget, optimizer="adam", **form)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(arguments.steps):
        piece = data[step * arguments.tokens : (step + 1) * arguments.tokens + 1]
        loss = compiled(piece[None, :-1], piece[None, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"step {step}: loss {loss.item():.4f}, peak {format_bytes(compiled.stats.measured_peak_bytes)} of {arguments.budget}"
        )


if __name__ == "__main__":
    main()
