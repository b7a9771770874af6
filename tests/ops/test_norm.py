"""The fused root-mean-square norm against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adjcomp import ops
from adjcomp.runtime.kernels.cpu import rms_norm, torch_norm

DTYPES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def plain(x: Tensor, weight: Tensor | None) -> Tensor:
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return normal if weight is None else weight * normal


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(2, 70),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(DTYPES)),
    st.booleans(),
)
def test_equals_its_definition(
    outer: list[int], width: int, weighted: bool, transposed: bool, dtype: torch.dtype, native: bool
) -> None:
    """Outputs and gradients, with and without weight, for any shape and layout, in C++ and in torch."""
    x = torch.randn([width, *outer] if transposed else [*outer, width], dtype=torch.float64).to(dtype)
    x = (x.movedim(0, -1) if transposed else x).requires_grad_()
    weight = torch.randn(width, dtype=torch.float64).to(dtype).requires_grad_() if weighted else None
    leaves = [t for t in (x, weight) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(rms_norm, "load", lambda name: None)
        got = ops.rms_norm(x, weight)
        seed = torch.randn_like(got)
        found = [got, *torch.autograd.grad(got, leaves, seed)]
    want = plain(exact[0], exact[1] if weighted else None)
    for have, expected in zip(found, [want, *torch.autograd.grad(want, exact, seed.double())], strict=True):
        error = (have.double() - expected).norm() / expected.norm().clamp_min(1e-2)
        assert error <= DTYPES[dtype]


def test_the_cotangent_of_a_residual_is_added() -> None:
    x, dy, residual = (torch.randn(2, 5, 33) for _ in range(3))
    weight = torch.randn(33)
    _, scale = torch.ops.adjcomp.rms_norm(x, weight, 1e-5)
    for mask in ([True, True], [True, False], [False, True]):
        alone = torch.ops.adjcomp.rms_norm_vjp(dy, None, x, weight, scale, mask)
        both = torch.ops.adjcomp.rms_norm_vjp(dy, residual, x, weight, scale, mask)
        slow = torch_norm.rms_norm_vjp(dy, residual, x, weight, scale, mask)
        assert [t is not None for t in both] == [t is not None for t in slow] == mask
        if mask[0]:
            torch.testing.assert_close(both[0], alone[0] + residual)
            torch.testing.assert_close(both[0], slow[0])
        if mask[1]:
            torch.testing.assert_close(both[1], slow[1])


def test_gradcheck() -> None:
    x, weight = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(ops.rms_norm, (x.requires_grad_(), weight.requires_grad_()))


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    x = torch.randn(3, 20)
    x[1, 7] = torch.nan
    y = ops.rms_norm(x, torch.ones(20))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: argument `weight`"):
        ops.rms_norm(torch.randn(2, 4), torch.randn(3))
    with pytest.raises(TypeError, match=r"`weight` is torch.float64; supported: x's dtype, torch.float32"):
        ops.rms_norm(torch.randn(2, 4), torch.randn(4, dtype=torch.float64))
    with pytest.raises(TypeError, match="int64"):
        ops.rms_norm(torch.ones(2, 4, dtype=torch.int64))
