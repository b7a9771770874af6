"""torch's associative_scan: linear recurrences become one op, anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fidelity
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

import adjcomp

Combine = Callable[[Any, Any], Any]


def linear(p: Any, q: Any) -> Any:
    return q[0] * p[0], q[0] * p[1] + q[1]


def swapped(p: Any, q: Any) -> Any:
    return torch.addcmul(q[0], q[1], p[0]), p[1] * q[1]


class Scan(nn.Module):
    """A gated recurrence over associative_scan; `plainly` runs it as a loop instead."""

    def __init__(self, combine: Combine, decay: int = 0, dim: int = 1, reverse: bool = False) -> None:
        super().__init__()
        self.combine, self.decay, self.dim, self.reverse = combine, decay, dim, reverse
        self.into = nn.Linear(4, 8)
        self.plainly = False

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, -1)
        pair = (torch.sigmoid(gate), value)
        pair = tuple(t.movedim(1, self.dim) for t in (pair if self.decay == 0 else pair[::-1]))
        if not self.plainly:
            products, h = associative_scan(self.combine, pair, self.dim, reverse=self.reverse, combine_mode="generic")
        else:
            steps = [tuple(t.select(self.dim, 0) for t in pair)]
            for i in range(1, x.shape[1]):
                steps.append(self.combine(steps[-1], tuple(t.select(self.dim, i) for t in pair)))
            products, h = (torch.stack(parts, self.dim) for parts in zip(*steps, strict=True))
        return (h + products if self.decay == 0 else products - h).movedim(self.dim, 1)


@pytest.mark.parametrize(("combine", "decay", "dim"), [(linear, 0, 1), (swapped, 1, 2)])
def test_a_linear_recurrence_trains_by_chunks(combine: Combine, decay: int, dim: int) -> None:
    """Given both results in use, then the gradients are those of the same recurrence as a loop."""
    torch.manual_seed(0)
    model = fidelity.Residual([Scan(combine, decay, dim) for _ in range(2)], 4).double()
    ids = torch.randint(0, 4, (2, 19))
    adjcomp.compile(model, chunk=5)(ids).square().sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, Scan):
            module.plainly = True
    model(ids).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert ours[name] is not None
        assert (p.grad - ours[name]).norm() <= 1e-10 * p.grad.norm() + 1e-14, name


@pytest.mark.parametrize(
    ("combine", "reverse", "words"),
    [
        (lambda p, q: (q[0] * p[0], q[0] * p[1] + 2 * q[1]), False, "a function of its own"),
        (lambda p, q: (q[0] * p[0], torch.maximum(q[0] * p[1], p[1]) + q[1]), False, "a function of its own"),
        (lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1].relu() - (-q[1]).relu()), False, "a function of its own"),
        (linear, True, "runs against time"),
    ],
)
def test_what_is_no_linear_recurrence_is_refused(combine: Combine, reverse: bool, words: str) -> None:
    model = fidelity.Residual([Scan(combine, reverse=reverse)], 4)
    with pytest.raises(adjcomp.CaptureError, match=words):
        adjcomp.compile(model)(torch.zeros(1, 9, dtype=torch.int64))
