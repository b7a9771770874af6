"""The chunked head with cross-entropy against torch's on full logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adjcomp import ops
from adjcomp.runtime.kernels import cross_entropy


def plain(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    logits = (x @ weight.T).float() if x.dtype != torch.float64 else x @ weight.T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum")


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([-100, 0]),
)
def test_equals_torch(batch: int, steps: int, width: int, vocabulary: int, rows: int, ignore: int) -> None:
    x = torch.randn(batch, steps, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (batch, steps))
    labels[:, ::3] = ignore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "BLOCK_ROWS", rows)
        patch.setattr(cross_entropy, "BLOCK_BYTES", 8 * 70 * rows)
        total, count = ops.linear_cross_entropy(x, weight, labels, ignore)
        got = torch.autograd.grad(total * 0.3, (x, weight))
    want = plain(x, weight, labels, ignore)
    torch.testing.assert_close(total, want)
    assert int(count) == int((labels != ignore).sum())
    torch.testing.assert_close(got, torch.autograd.grad(want * 0.3, (x, weight)))


@pytest.mark.parametrize("where", ["valid row", "ignored row"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_spread_as_in_torch(value: float, where: str) -> None:
    x = torch.randn(1, 6, 4)
    x[0, 0 if where == "valid row" else 5, 0] = value
    weight = torch.randn(200, 4)
    labels = torch.tensor([[3, 199, 0, 5, -100, -100]])
    x, weight = x.requires_grad_(), weight.requires_grad_()
    total, want = ops.linear_cross_entropy(x, weight, labels)[0], plain(x, weight, labels)
    torch.testing.assert_close(total, want, equal_nan=True)
    for p, q in zip(torch.autograd.grad(total, (x, weight)), torch.autograd.grad(want, (x, weight)), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


def test_an_impossible_label_costs_infinity() -> None:
    weight = torch.zeros(5, 1)
    weight[2] = -torch.inf
    total, _ = ops.linear_cross_entropy(torch.ones(1, 1, 1), weight, torch.tensor([[2]]))
    assert total == torch.inf


def test_logits_may_be_rounded_as_a_head_in_bfloat16_rounds_them() -> None:
    x, weight = torch.randn(1, 30, 64).bfloat16(), torch.randn(97, 64).bfloat16()
    labels = torch.randint(0, 97, (1, 30))
    rounded, _ = ops.linear_cross_entropy(x, weight, labels, logits_dtype=torch.bfloat16)
    exact, _ = ops.linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(rounded, plain(x, weight, labels), rtol=1e-4, atol=0)
    torch.testing.assert_close(exact, plain(x.float(), weight.float(), labels))
    assert rounded.dtype == torch.float32


def test_all_rows_ignored() -> None:
    x = torch.randn(1, 3, 2, requires_grad=True)
    total, count = ops.linear_cross_entropy(x, torch.randn(5, 2), torch.full((1, 3), -100))
    assert (total.item(), count.item()) == (0.0, 0)
    assert not torch.autograd.grad(total, x)[0].any()


@pytest.mark.parametrize("label", [-1, 5])
def test_labels_outside_the_vocabulary(label: int) -> None:
    with pytest.raises(IndexError, match=f"linear_cross_entropy: Target {label} is out of bounds"):
        ops.linear_cross_entropy(torch.randn(1, 2, 3), torch.randn(5, 3), torch.tensor([[0, label]]))
