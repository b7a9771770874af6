"""Gradients of tables, added row by row."""

from __future__ import annotations

import pytest
import torch
from fidelity import compare
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import adjcomp
from adjcomp.runtime.rows import add_rows


@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_equals_the_gradient_of_an_embedding(size: int, shape: list[int], width: int, padded: bool) -> None:
    rows, value = torch.randint(0, size, shape), torch.randn(*shape, width, dtype=torch.float64)
    padding = size - 1 if padded else None
    total = torch.randn(size, width, dtype=torch.float64)
    want = total + torch.ops.aten.embedding_dense_backward(value, rows, size, -1 if padding is None else padding, False)
    add_rows(total, rows, value, padding)
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_with_a_padding_row(tied: bool) -> None:
    """Tied or not, in float64 and in bfloat16."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 6, padding_idx=2)
            self.mix = nn.Linear(6, 6)
            self.head = nn.Linear(6, 13, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + adjcomp.ops.linear_scan(torch.sigmoid(x), self.mix(x))[0]
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())

    ids = torch.randint(0, 13, (2, 23))
    model = Model()
    compare(model.double(), adjcomp.compile(model, chunk=6), lambda m: m(ids), 1e-5)
    low = model.bfloat16()
    exact = Model().double()
    exact.load_state_dict(low.state_dict())
    exact(ids).backward()
    errors = []
    for run in (low, adjcomp.compile(low, chunk=6)):
        low.zero_grad()
        run(ids).backward()
        errors.append(
            sum((p.grad.double() - q.grad).norm() ** 2 for p, q in zip(low.parameters(), exact.parameters(), strict=True))
        )
    assert errors[1] <= 1.5**2 * errors[0]
