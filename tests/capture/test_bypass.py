"""A first value that later layers read again doesn't join them to one layer."""

from __future__ import annotations

import fidelity
import pytest
import torch
from fidelity import Block, compare, tokens
from torch import Tensor, nn

import adjcomp


class Joined(nn.Module):
    """Blocks, before every second of which the embedded input is joined to the stream, by one projection for all."""

    def __init__(self, vocab: int | None, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8) if vocab is None else nn.Embedding(vocab, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(layers)])
        self.join, self.head, self.drop = nn.Linear(16, 8), nn.Linear(8, 31), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        first = torch.clone(x)
        for k, block in enumerate(self.blocks):
            x = block(x + self.join(torch.cat([x, first], -1)) if k % 2 else x)
        return self.head(x)


@pytest.mark.parametrize("vocab", [31, pytest.param(None, marks=pytest.mark.slow)])
def test_layers_that_look_tokens_up_again_stay_layers(vocab: int | None) -> None:
    model = Joined(vocab).double()
    x = tokens(2, 19, vocab=31) if vocab else torch.randn(2, 19, 8, dtype=torch.float64)
    view = adjcomp.compile(model, chunk=6)
    compare(model, view, lambda m: m(x).pow(2).sum(), bound=1e-10)
    assert adjcomp.explain(model, (x,)).layer_count == (6 if vocab else 2)
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes


@pytest.mark.slow
def test_what_is_drawn_is_drawn_once() -> None:
    """Given dropout on the embedding, when later layers read it again, then they read the same numbers as the first."""
    model, ids = Joined(31, dropout=0.5), tokens(1, 19, vocab=31)
    found = []
    for chunk in (4, 19):
        view = adjcomp.compile(model, chunk=chunk)
        torch.manual_seed(3)
        found.append(fidelity.measure(model, lambda view=view: view(ids).pow(2).sum()))
    assert fidelity.distance(*found) <= 1e-5
