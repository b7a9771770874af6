"""Products of rows with the matrix that each names."""

from __future__ import annotations

import pytest
import torch

from adjcomp import ops


@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_a_product_with_each_rows_own_matrix(transposed: bool) -> None:
    """Outputs and gradients; a matrix that no row names gets zeros; its layout is whatever it was."""
    torch.manual_seed(0)
    group = torch.tensor([3, 0, 3, 1, 0, 3, 3])
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, 5, dtype=torch.float64) if transposed else torch.randn(4, 5, 6, dtype=torch.float64)
    weight = (weight.transpose(1, 2) if transposed else weight).requires_grad_()
    want = (x[:, None] @ weight[group])[:, 0]
    got = ops.grouped_linear(x, weight, group)
    seed = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    theirs, ours = (torch.autograd.grad(out, (x, weight), seed) for out in (want, got))
    torch.testing.assert_close(ours, theirs)
    assert not ours[1][2].any()


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(2, 5, 6)
    ops.grouped_linear(x, weight, torch.tensor([0, 1, 1])).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_a_group_that_there_is_not_is_an_error() -> None:
    x, weight = torch.randn(3, 5), torch.randn(2, 5, 6)
    with pytest.raises(IndexError, match="group 2 of 2"):
        ops.grouped_linear(x, weight, torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="weight"):
        ops.grouped_linear(x, weight.double(), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="group"):
        ops.grouped_linear(x, weight, torch.tensor([0, 1]))
