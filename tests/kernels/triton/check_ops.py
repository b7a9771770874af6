"""Every op's Triton kernels in Triton's interpreter against the float64 reference.

Collected only where test_interpreter.py names it, in a process with TRITON_INTERPRET=1. Sizes are tiny: the interpreter takes
milliseconds for a step of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import op_cases
import pytest
import torch
from interpreted import guarded
from op_cases import Case, relative_errors
from torch import Tensor

from adjcomp.runtime.kernels.triton import configs

TINY: dict[str, Callable[[int], Case]] = {
    "linear_scan": lambda t: op_cases.linear_scan(t, 1, 3),
    "complex": lambda t: op_cases.linear_scan(t, 1, 3, complex_=True),
    "selective_scan": lambda t: op_cases.selective_scan(t, 1, 3, 2),
    "causal_conv1d": lambda t: op_cases.causal_conv1d(t, 1, 3),
}
KERNELS = {name: TINY[name](1).name for name in TINY}


def rows_of_wider(t: Tensor) -> Tensor:
    """The same values as a view whose last dimension is a slice of a wider one."""
    return torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]]


def channel_first(t: Tensor) -> Tensor:
    """The same values with time (or the first of two dimensions) fastest in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


def configurations(op: str) -> Iterator[configs.Row]:
    """The table's rows for the op's kernels, and each with other block sizes."""
    for row in configs.rows():
        if row.kernel.startswith(op):
            yield row
            smaller = {name: max(16, size // 2) for name, size in row.config.constants.items() if name == "BLOCK_D"}
            if smaller:
                yield replace(row, config=replace(row.config, constants={**row.config.constants, **smaller}))


@pytest.mark.parametrize("steps", [1, 3, 70])
@pytest.mark.parametrize("name", TINY)
def test_float32_is_within_2e_6_of_float64_and_stays_in_its_bounds(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(steps)
    with guarded(monkeypatch):
        errors = relative_errors(TINY[name](steps), torch.float32)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("layout", [rows_of_wider, channel_first])
@pytest.mark.parametrize("name", TINY)
def test_strided_arguments(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    errors = relative_errors(TINY[name](9), torch.float32, layout)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TINY)
def test_half_precision_rounds_inputs_and_outputs_only(name: str, dtype: torch.dtype) -> None:
    if name == "complex":
        pytest.skip("no complex half")
    torch.manual_seed(0)
    errors = relative_errors(TINY[name](7), dtype)
    assert max(errors.values()) <= torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("name", TINY)
def test_every_configuration(name: str) -> None:
    op = KERNELS[name]
    for row in configurations(op):
        torch.manual_seed(0)
        with configs.forced(row.kernel, row.config):
            errors = relative_errors(TINY[name](5), torch.float32)
        assert max(errors.values()) <= 2e-6, (row, errors)


def outcome(case: Case) -> list[Tensor]:
    leaves = {name: t.float() if not t.is_complex() else t.to(torch.complex64) for name, t in case.given().items()}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out = case.op(**leaves, **case.options)
    return [*out, *torch.autograd.grad([o.abs().square().sum() for o in out], [*leaves.values()])]


@pytest.mark.parametrize("name", TINY)
def test_reruns_are_bit_identical(name: str) -> None:
    torch.manual_seed(0)
    case = TINY[name](40)
    for first, second in zip(outcome(case), outcome(case), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", TINY)
def test_each_cotangent_alone(name: str) -> None:
    """Either output may have no cotangent, and any input may want none."""
    torch.manual_seed(0)
    case = TINY[name](5)
    names = list(case.given())
    leaves = {k: (t.float() if not t.is_complex() else t.to(torch.complex64)).requires_grad_() for k, t in case.given().items()}
    out = case.op(**leaves, **case.options)
    terms = [o.abs().square().sum() for o in out]
    both = torch.autograd.grad(sum(terms), [*leaves.values()], retain_graph=True)
    parts = [torch.autograd.grad(term, [*leaves.values()], retain_graph=True, allow_unused=True) for term in terms]
    for total, *shares in zip(both, *parts, strict=True):
        torch.testing.assert_close(total, sum(torch.zeros_like(total) if s is None else s for s in shares), rtol=1e-4, atol=1e-5)
    for wanted, expected in zip(names, both, strict=True):
        alone = {k: t.detach().requires_grad_(k == wanted) for k, t in leaves.items()}
        again = case.op(**alone, **case.options)
        torch.testing.assert_close(
            torch.autograd.grad(sum(o.abs().square().sum() for o in again), alone[wanted])[0], expected, rtol=1e-5, atol=1e-6
        )
