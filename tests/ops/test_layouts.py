"""Strides, mixed dtypes, partial cotangents: what callers hand over beside contiguous tensors of one dtype."""

from __future__ import annotations

from collections.abc import Callable

import op_cases
import pytest
import torch
from op_cases import SMALL, Case, relative_errors
from torch import Tensor


def rows_of_wider(t: Tensor) -> Tensor:
    """The same values as a view whose last dimension is a slice of a wider one."""
    return torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]]


def channel_first(t: Tensor) -> Tensor:
    """The same values with time (or the first of two dimensions) fastest in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


def every_other(t: Tensor) -> Tensor:
    """The same values at every second place of the last dimension."""
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


@pytest.mark.parametrize("layout", [rows_of_wider, channel_first, every_other])
@pytest.mark.parametrize("name", SMALL)
def test_strided_arguments(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    errors = relative_errors(SMALL[name](37), torch.float32, layout)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("name", SMALL)
def test_results_are_time_major_contiguous(name: str) -> None:
    """Given arguments of any layout, then outputs and cotangents are contiguous."""
    case = SMALL[name](9)
    leaves = {k: channel_first(t).detach().requires_grad_() for k, t in case.given().items()}
    found = case.op(**leaves, **case.options)
    cotangents = torch.autograd.grad([o.abs().square().sum() for o in found], [*leaves.values()])
    assert all(result.is_contiguous() for result in (*found, *cotangents))


def test_expanded_decays() -> None:
    a = torch.rand(3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 40, 3, dtype=torch.float64)
    case = SMALL["linear_scan"](1)
    got = case.op(a.expand(2, 40, 3), b)[0]
    want = case.reference(a.expand(2, 40, 3), b)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), a), torch.autograd.grad(want.sum(), a))


@pytest.mark.parametrize("name", ["selective_scan", "ssd", "causal_conv1d", "gated_delta_rule"])
def test_mixed_dtypes(name: str) -> None:
    case = SMALL[name](20)
    low = {"x", "B", "C", "z", "q", "k", "v"}
    args = {k: t.to(torch.bfloat16 if k in low else torch.float32).requires_grad_() for k, t in case.given().items()}
    out, last = case.op(**args, **case.options)
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad([out.sum(), last.sum()], [*args.values()])
    assert [g.dtype for g in grads] == [t.dtype for t in args.values()]


def gradients(case: Case, of: slice, wanted: list[str]) -> list[Tensor]:
    leaves = {k: t.detach().clone().requires_grad_(k in wanted) for k, t in case.given().items()}
    out = case.op(**leaves, **case.options)[of]
    return list(torch.autograd.grad([o.abs().square().sum() for o in out], [leaves[k] for k in wanted], allow_unused=True))


@pytest.mark.parametrize("name", SMALL)
def test_the_cotangent_of_either_output_may_be_absent(name: str) -> None:
    case = SMALL[name](33)
    names = list(case.given())
    both, first, last = (gradients(case, of, names) for of in (slice(None), slice(1), slice(1, None)))
    for total, one, other in zip(both, first, last, strict=True):
        torch.testing.assert_close(total, (0 if one is None else one) + (0 if other is None else other))


@pytest.mark.parametrize("name", SMALL)
def test_each_gradient_alone_equals_the_one_among_all(name: str) -> None:
    case = SMALL[name](33)
    names = list(case.given())
    together = gradients(case, slice(None), names)
    for wanted, expected in zip(names, together, strict=True):
        torch.testing.assert_close(gradients(case, slice(None), [wanted])[0], expected)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("cut", [1, 3, 20, 32, 36])
def test_two_chunks_joined_by_the_state_equal_one(name: str, cut: int) -> None:
    case = SMALL[name](37)
    whole, last = case.op(**case.given(), **case.options)
    state = {"causal_conv1d": "tail"}.get(case.name, "h0")
    first = {k: t[:, :cut] if k in case.timed else t for k, t in case.given().items()}
    head, border = case.op(**first, **case.options)
    second = {k: t[:, cut:] if k in case.timed else t for k, t in case.given().items()} | {state: border}
    rest, end = case.op(**second, **case.options)
    torch.testing.assert_close(torch.cat([head, rest], 1), whole)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("make", [op_cases.linear_attention, op_cases.max_plus_scan, op_cases.gated_delta_rule, op_cases.ssd])
def test_results_hold_no_more_than_they_show(make: Callable[..., Case]) -> None:
    """Given one row, where a step of time is dense as it lies, no output or cotangent is a view of something larger."""
    case = make(6, b=1)
    given = {name: t.float().requires_grad_() for name, t in case.given().items()}
    outputs = case.op(**given, **case.options)
    grads = torch.autograd.grad([*outputs], [*given.values()], [torch.ones_like(out) for out in outputs])
    for result in (*outputs, *grads):
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
