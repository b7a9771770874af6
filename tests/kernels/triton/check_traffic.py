"""Bytes moved by the kernels that memory bounds, counted in Triton's interpreter. Collected as check_ops.py is.

The least a kernel can move is each of its streams (arguments with time and channels) once. What it moves beside them weighs most
here: streams are bfloat16, states and sums float32, and segments of time are the shortest that there are.
"""

from __future__ import annotations

from collections.abc import Callable

import interpreted  # noqa: F401 - it sends the ops to their Triton kernels
import op_cases
import pytest
import torch
from op_cases import Case
from traffic import counted

from adjcomp import ops
from adjcomp.ops.library import call

ALLOWED = 1.25
# Walks over borders of segments move a few percent of what the other steps do; a product of matrices is bound by arithmetic.
OTHERS = {"linear_scan_join", "dense_scan_join", "dense_scan_summary"}


def both_ways(case: Case) -> Callable[[], object]:
    """An op and its VJP in bfloat16."""

    def run() -> object:
        low = {name: t.to(torch.bfloat16).requires_grad_() for name, t in case.given().items()}
        got = case.op(**low, **case.options)
        return torch.autograd.grad([*got], [*low.values()], [torch.randn_like(g) for g in got])

    return run


def norm() -> object:
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((1, 64, 128), (128,)))
    y = ops.rms_norm(x, weight, 1e-5)
    return torch.autograd.grad(y, (x, weight), torch.randn_like(y))


def loss() -> object:
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((1, 8, 4), (1500, 4)))
    total, _ = ops.linear_cross_entropy(x, weight, torch.randint(0, 1500, (1, 8)))
    return torch.autograd.grad(total, (x, weight))


def uniform() -> object:
    return ops.counter_uniform(torch.tensor(1), 3, (1, 64, 128), 1, torch.tensor(0))


CALLS: dict[str, Callable[[], object]] = {
    "linear_scan": both_ways(op_cases.linear_scan(32, 1, 32)),
    "causal_conv1d": both_ways(op_cases.causal_conv1d(125, 1, 16)),
    "rms_norm": norm,
    "cross_entropy": loss,
    "counter_uniform": uniform,
    "dense_scan": both_ways(op_cases.dense_scan(32, 1, 16)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "dense_scan" else n for n in CALLS])
def test_bytes_are_within_a_quarter_of_the_least(name: str) -> None:
    """Given short segments, when an op runs both ways, then each of its kernels moves at most 1.25 times its streams."""
    torch.manual_seed(0)
    with counted() as found:
        CALLS[name]()
    ratios = {kernel: traffic.ratio for kernel, traffic in found.items() if kernel not in OTHERS}
    assert ratios
    assert max(ratios.values()) <= ALLOWED, ratios


def test_the_vjp_of_selective_scan_moves_at_most_a_quarter_more_than_the_least() -> None:
    """Given 16 states and 128 channels, when one segment is walked back, then what it moves for one of 512 steps is counted.

    Checkpoints and partial sums go with the steps. What enters a segment, what leaves it (`mu`, read and written) and its share
    of dA go with segments. Scratch stays in the L2 cache; B, C and parameters are shared by the blocks of channels.
    """
    steps, channels, states = 64, 128, 16
    x, A, B = torch.randn(1, steps, channels).bfloat16(), -torch.rand(channels, states), torch.randn(1, steps, states).bfloat16()
    kept, mask = torch.zeros(1, 3, states, channels), [True] * 9
    with counted() as found:
        call("selective_scan_vjp", x, A[None], x, x.abs(), A, B, B, A[:, 0], x, A[:, 0], kept, True, mask)
    moved = found["selective_scan_vjp"].arguments
    least = sum(moved[name] for name in ("x", "dt", "z", "dy", "dx", "ddt", "dz"))
    assert least == 14 * steps * channels
    along = sum(moved[name] for name in ("states", "dB", "dC"))
    borders = 2 * moved["mu"] + moved["dA"]
    assert (least + along + borders * steps / 512) / least <= ALLOWED
