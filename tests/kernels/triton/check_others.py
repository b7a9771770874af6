"""What is no recurrence, in Triton's interpreter: loss, norm and random numbers. Collected as check_ops.py is."""

from __future__ import annotations

import interpreted  # noqa: F401 - it sends the ops to their Triton kernels
import op_cases
import pytest
import torch
from torch import Tensor

from adjcomp import ops
from adjcomp.ops import reference
from adjcomp.runtime.kernels.triton import linear_cross_entropy


def plain_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x @ weight.T).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("rows", [3, 64])
def test_cross_entropy_equals_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given blocks that neither rows nor vocabulary fill, then loss and gradients are those of full logits."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_ROWS", rows)
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_BYTES", 4 * rows * 130)
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True)
    labels = torch.randint(0, 300, (2, 5))
    labels[0, ::3] = -100
    loss, count = ops.linear_cross_entropy(x, weight, labels)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = plain_loss(wide[0], wide[1], labels)
    assert int(count) == int((labels != -100).sum())
    assert abs(loss.item() / want.item() - 1) <= 2e-6
    grads = zip(torch.autograd.grad(0.3 * loss, (x, weight)), torch.autograd.grad(0.3 * want, wide), strict=True)
    for got, expected in grads:
        assert ((got - expected).norm() / expected.norm()).item() <= 2e-6


def test_cross_entropy_adds_to_a_sum_over_chunks() -> None:
    torch.manual_seed(0)
    x, weight, labels = torch.randn(1, 5, 8), torch.randn(30, 8), torch.randint(0, 30, (1, 5))
    _, _, norm = torch.ops.adjcomp.linear_cross_entropy(x, weight, labels, -100, None)
    given = (torch.tensor(0.5), x, weight, labels, norm, -100, None)
    dx, dweight = torch.ops.adjcomp.linear_cross_entropy_vjp(*given, [True, True])
    total = torch.ones_like(weight)
    torch.testing.assert_close(torch.ops.adjcomp.linear_cross_entropy_add_vjp(*given, True, total), dx)
    torch.testing.assert_close(total, dweight + 1)
    assert torch.ops.adjcomp.linear_cross_entropy_add_vjp(*given, False, total).numel() == 0


def test_an_impossible_label_costs_infinity() -> None:
    weight = torch.zeros(5, 1)
    weight[2] = -torch.inf
    loss, _ = ops.linear_cross_entropy(torch.ones(1, 3, 1), weight, torch.tensor([[2, 1, -100]]))
    assert loss.item() == torch.inf


@pytest.mark.parametrize("channels", [1, 7, 1025])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(channels: int, weighted: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 19, channels, requires_grad=True), torch.randn(channels, requires_grad=weighted)
    dy, dresidual = torch.randn(2, 19, channels), torch.randn(2, 19, channels)
    y, scale = torch.ops.adjcomp.rms_norm(x.detach(), weight.detach() if weighted else None, 1e-5)
    mask = [True, weighted]
    found = torch.ops.adjcomp.rms_norm_vjp(dy, dresidual, x.detach(), weight.detach() if weighted else None, scale, mask)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.nn.functional.rms_norm(leaves[0], (channels,), leaves[1] if weighted else None, 1e-5)
    expected = torch.autograd.grad([want, leaves[0]], leaves[: 1 + weighted], [dy.double(), dresidual.double()])
    for got, exact in ((y, want), *zip(found, expected, strict=False)):
        assert ((got - exact).norm() / exact.norm()).item() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_and_norm_in_half_precision_are_no_worse_than_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for errors in (op_cases.loss_beside_eager(dtype, 20, 16, 200), op_cases.norm_beside_eager(dtype, 20, 40)):
        assert not op_cases.worse_than_eager(errors), errors


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 130), (7,)])
def test_uniforms_are_bit_for_bit_those_of_the_reference(shape: tuple[int, ...]) -> None:
    time_dim = min(1, len(shape) - 1)
    seed, offset = -(2**61) + 12345, (1 << 40) + 7
    got = ops.counter_uniform(torch.tensor(seed), 3, shape, time_dim, torch.tensor(offset))
    flat = got.reshape(-1, shape[time_dim], max(1, got[(0,) * (time_dim + 1)].numel()))
    for outer, time, inner in ((0, 0, 0), (flat.shape[0] - 1, flat.shape[1] - 1, flat.shape[2] - 1)):
        assert flat[outer, time, inner].item() == reference.counter_uniform(seed, 3, outer, offset + time, inner)
