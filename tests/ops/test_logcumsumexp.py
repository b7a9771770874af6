"""The running log-sum-exp: values and gradients against torch's, its state, and minGRU in log space as a model."""

from __future__ import annotations

import fidelity
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import adjcomp
from adjcomp import ops
from adjcomp.ops import reference


def inputs(t: int, scale: float) -> Tensor:
    return (torch.randn(2, t, 3, dtype=torch.float64) * scale).requires_grad_()


@settings(max_examples=25, deadline=None)
@given(t=st.integers(1, 40), cut=st.integers(0, 40), scale=st.sampled_from([0.1, 3.0, 200.0]), seed=st.integers(0, 99))
def test_pieces_that_hand_on_their_state_are_the_whole(t: int, cut: int, scale: float, seed: int) -> None:
    """Given a sequence in one or two pieces, then values and gradients are those of torch.logcumsumexp."""
    torch.manual_seed(seed)
    x, weight = inputs(t, scale), torch.randn(2, t, 3, dtype=torch.float64)
    cut, state, made = min(cut, t), None, []
    for piece in (x[:, :cut], x[:, cut:]):
        if piece.shape[1]:
            y, state = ops.logcumsumexp(piece, state)
            made.append(y)
    ours, wanted = torch.cat(made, 1), torch.logcumsumexp(x, 1)
    assert torch.allclose(ours, wanted, rtol=1e-13, atol=1e-12)
    gradient, true = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, reference.logcumsumexp(x)[0]))
    assert (gradient - true).norm() <= 1e-11 * true.norm()


def test_gradients_of_inputs_and_state() -> None:
    torch.manual_seed(0)
    state = torch.stack((torch.randn(2, 3), torch.rand(2, 3) + 0.1), -1).double()
    assert torch.autograd.gradcheck(ops.logcumsumexp, (inputs(5, 1.0), state.requires_grad_()))


def test_nothing_yet_is_minus_infinity_and_takes_no_gradient() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf, 1.0, -torch.inf]]).requires_grad_()
    y, state = ops.logcumsumexp(x, torch.zeros(1, 2))
    y[:, 2:].sum().backward()
    assert y.tolist() == [[-torch.inf, -torch.inf, 1.0, 1.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0, 2.0, 0.0]]
    assert state.tolist() == [[1.0, 1.0]]
    assert torch.isnan(ops.logcumsumexp(torch.tensor([[0.0, torch.nan]]))[0][0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(1, 50, 4).to(dtype).requires_grad_()
    y, state = ops.logcumsumexp(x)
    assert y.dtype is dtype
    assert state.dtype is torch.float32
    assert torch.equal(y, torch.logcumsumexp(x.double(), 1).to(dtype))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is dtype


class LogMinGru(nn.Module):
    """minGRU as it is written in log space (arXiv 2410.01201, appendix B)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.into = nn.Linear(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.into(x).chunk(2, -1)
        decay = -functional.softplus(gate).cumsum(1)
        value = torch.where(hidden >= 0, (functional.relu(hidden) + 0.5).log(), -functional.softplus(-hidden))
        return (decay + (value - functional.softplus(-gate) - decay).logcumsumexp(1)).exp()


def test_mingru_in_log_space_trains_by_chunks() -> None:
    torch.manual_seed(0)
    model = fidelity.Residual([LogMinGru(6) for _ in range(2)], 6).double()
    ids = torch.randint(0, 6, (2, 23))
    report = adjcomp.check_gradients(model, (ids,), chunk=7)
    assert report.max_relative_error <= 1e-10, str(report)
    with pytest.raises(adjcomp.CaptureError, match=r"adjoint_window=4: .*logcumsumexp.* has no windowed adjoint"):
        adjcomp.check_gradients(model, (ids,), chunk=7, adjoint_window=4)
