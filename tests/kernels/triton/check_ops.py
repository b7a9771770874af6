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
from op_cases import Careful, Case, errors_beside_eager, relative_errors, worse_than_eager
from summary_cases import summary_errors
from torch import Tensor

from adjcomp.runtime.kernels.triton import configs

TINY: dict[str, Callable[[int], Case]] = {
    "linear_scan": lambda t: op_cases.linear_scan(t, 1, 3),
    "complex": lambda t: op_cases.linear_scan(t, 1, 3, complex_=True),
    "dense_scan": lambda t: op_cases.dense_scan(t, 1, 3),
    "dense_complex": lambda t: op_cases.dense_scan(t, 1, 3, complex_=True),
    "selective_scan": lambda t: op_cases.selective_scan(t, 1, 3, 2),
    "ssd": lambda t: op_cases.ssd(t, 1, 1, 2, 3, 2),
    "delta": lambda t: op_cases.gated_delta_rule(t, 1, 2, 3, 5),
    "delta_channels": lambda t: op_cases.gated_delta_rule(t, 1, 1, 3, 5, wide_decay=True),
    "causal_conv1d": lambda t: op_cases.causal_conv1d(t, 1, 3),
}
# Sizes that take more than one block of every kind.
WIDE: dict[str, Callable[[], Case]] = {
    "dense_scan": lambda: op_cases.dense_scan(20, 1, 17),
    "selective_scan": lambda: op_cases.selective_scan(70, 2, 65, 9),
    "ssd": lambda: op_cases.ssd(66, 1, 2, 1, 33, 17),
    "delta": lambda: op_cases.gated_delta_rule(66, 1, 1, 66, 34),
    "delta_channels": lambda: op_cases.gated_delta_rule(66, 1, 1, 66, 34, wide_decay=True),
}
HEAVY = ("ssd", "delta", "delta_channels")  # a step of these takes the interpreter seconds
FEW = [name for name in TINY if name not in HEAVY]
ALL = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in HEAVY)]
# How the names of an op's kernels start.
KERNELS = {"complex": "linear_scan", "dense_complex": "dense_scan", "delta_channels": "delta"}


def rows_of_wider(t: Tensor) -> Tensor:
    """The same values as a view whose last dimension is a slice of a wider one."""
    return torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]]


def channel_first(t: Tensor) -> Tensor:
    """The same values with time (or the first of two dimensions) fastest in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


def configurations(op: str) -> Iterator[configs.Config]:
    """Every configuration of the op's kernels, and those that have blocks of channels with smaller ones."""
    for row in configs.rows():
        if row.config.kernel.startswith(op):
            yield row.config
            if "BLOCK_D" in row.config.constants:
                constants = {**row.config.constants, "BLOCK_D": max(16, row.config.constants["BLOCK_D"] // 2)}
                yield replace(row.config, constants=constants)


@pytest.mark.parametrize("steps", [1, 70])
@pytest.mark.parametrize("name", TINY)
def test_float32_is_within_2e_6_of_float64_and_stays_in_its_bounds(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(steps)
    with guarded(monkeypatch):
        errors = relative_errors(TINY[name](steps), torch.float32)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if "delta" in name else name for name in WIDE])
def test_more_than_one_block_of_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with guarded(monkeypatch):
        errors = relative_errors(WIDE[name](), torch.float32, floor=0.02)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize("steps", [21, 66])
@pytest.mark.parametrize("name", ["ssd", "delta", "delta_channels"])
def test_gradient_of_strong_decays(name: str, steps: int) -> None:
    """Given decays of e^-15 a step and more, then the gradient of their logarithms is right, small as it is."""
    torch.manual_seed(0)
    case = TINY[name](steps)
    decays, size = ("A", -25.0) if name == "ssd" else ("g", -20.0)
    strong = torch.full_like(case.given()[decays], size)
    errors = relative_errors(replace(case, tensors={**case.tensors, decays: strong}), torch.float32)
    assert max(errors.values()) <= 1e-5, errors


def far_apart(t: Tensor) -> Tensor:
    """The same values with more than 2^31 elements between sequences; what lies between is never touched."""
    if t.dim() < 3:
        return t
    stride = (1 << 31) + 8
    room = torch.empty(stride + t[0].numel(), dtype=t.dtype)
    return room.as_strided(t.shape, (stride, *t[0].contiguous().stride())).copy_(t)


FAR: dict[str, Case] = {
    "linear_scan": op_cases.linear_scan(3, 2, 3),
    "dense_scan": op_cases.dense_scan(3, 2, 2),
    "selective_scan": op_cases.selective_scan(3, 2, 3, 2),
    "ssd": op_cases.ssd(3, 2, 1, 1, 3, 2),
    "delta": op_cases.gated_delta_rule(3, 2, 1, 3, 2),
    "causal_conv1d": op_cases.causal_conv1d(3, 2, 3),
}


@pytest.mark.parametrize("name", [name for name in TINY if name != "causal_conv1d"])
def test_summaries_join_to_the_whole(name: str) -> None:
    torch.manual_seed(0)
    assert max(summary_errors(TINY[name](21), [4, 20], torch.float32)) <= 4e-6


@pytest.mark.parametrize("name", FAR)
def test_offsets_beyond_32_bits(name: str) -> None:
    torch.manual_seed(0)
    errors = relative_errors(FAR[name], torch.bfloat16, far_apart, floor=0.02)
    assert max(errors.values()) <= 2 * torch.finfo(torch.bfloat16).eps, errors


@pytest.mark.parametrize("layout", [rows_of_wider, channel_first])
@pytest.mark.parametrize("name", ALL)
def test_strided_arguments(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    errors = relative_errors(TINY[name](9), torch.float32, layout)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_rounds_inputs_and_outputs_only(name: str, dtype: torch.dtype) -> None:
    """No worse than eager torch, in the dtype throughout or (but for scans that return every state) at the edges only."""
    if "complex" in name:
        pytest.skip("no complex half")
    for eager in Careful if name not in ("linear_scan", "dense_scan") else (Careful.THROUGHOUT,):
        torch.manual_seed(0)
        errors = errors_beside_eager(TINY[name](7), dtype, eager)
        assert not worse_than_eager(errors), errors
        assert max(ours for ours, _ in errors.values()) <= torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("name", ALL)
def test_every_configuration(name: str) -> None:
    for config in configurations(KERNELS.get(name, name)):
        torch.manual_seed(0)
        with configs.forced(config):
            errors = relative_errors(TINY[name](5), torch.float32)
        assert max(errors.values()) <= 2e-6, (config, errors)


def outcome(case: Case) -> list[Tensor]:
    leaves = {name: t.float() if not t.is_complex() else t.to(torch.complex64) for name, t in case.given().items()}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out = case.op(**leaves, **case.options)
    return [*out, *torch.autograd.grad([o.abs().square().sum() for o in out], [*leaves.values()])]


@pytest.mark.parametrize("name", [*FEW, "delta"])
def test_results_are_contiguous(name: str) -> None:
    """Whatever a kernel pads or turns: programs view results and cotangents as their shapes say."""
    torch.manual_seed(0)
    assert all(result.is_contiguous() for result in outcome(TINY[name](3)))


@pytest.mark.parametrize("name", ALL)
def test_reruns_are_bit_identical(name: str) -> None:
    torch.manual_seed(0)
    case = TINY[name](40)
    for first, second in zip(outcome(case), outcome(case), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ALL)
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
