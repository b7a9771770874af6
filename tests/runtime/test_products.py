"""Products of a VJP that add in place, where cotangents are joined or summed."""

from __future__ import annotations

import fidelity
import torch

import adjcomp
from adjcomp.ir.program import Accumulate, AccumulateProduct, Compute, Span
from adjcomp.passes.pipeline import run_capture
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.split import KeepPolicy, split

aten = torch.ops.aten


def test_cotangents_of_a_split_projection_are_never_joined() -> None:
    """Given Mamba blocks, whose projections are split, then the wide one's cotangents are multiplied apart, each product is added
    in place, and the narrow one's are joined: a copy of few columns costs less than products of their own.
    """
    ids = fidelity.tokens(2, 16)
    captured = run_capture(fidelity.FAMILIES["mamba"](), (), {"input_ids": ids, "labels": ids})
    joint = captured.joints[1]
    assert joint is not None
    vjp = tile_programs(captured.stack.templates[1], split(joint, KeepPolicy.LEAN), 32).vjp
    assert vjp is not None
    spans = [step.span for step in vjp.instructions if isinstance(step, AccumulateProduct) and step.span is not None]
    assert spans == [Span(0, 0, 64), Span(0, 64, 128)]
    targets = [step.target for step in vjp.instructions if isinstance(step, Compute)]
    assert targets.count(aten.cat.default) == 1
    assert aten.addmm_.default in targets
    assert aten.add.Tensor not in targets


def test_a_gradient_that_is_zero_but_for_a_span_is_never_made_whole() -> None:
    """Given a layer that reads a slice of its weights, then what is added to their gradient lies in that slice."""

    class Sliced(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(12, 4, dtype=dtype))
            self.scale = torch.nn.Parameter(torch.randn(9, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.nn.functional.linear(x, self.weight[4:8]) * self.scale[2:6]
            return x + adjcomp.ops.linear_scan(torch.sigmoid(x), x)[0]

    for dtype in (torch.float32, torch.bfloat16):
        model, x = Sliced(dtype), torch.randn(2, 16, 4, dtype=dtype)
        captured = run_capture(model, (x,), {})
        index = next(k for k, t in enumerate(captured.stack.templates) if len(t.inputs) > 2)
        joint = captured.joints[index]
        assert joint is not None
        vjp = tile_programs(captured.stack.templates[index], split(joint, KeepPolicy.LEAN), 8).vjp
        assert vjp is not None
        spans = [step.span for step in vjp.instructions if isinstance(step, Accumulate | AccumulateProduct)]
        assert sorted(map(str, spans)) == ["[2:6]", "[4:8]"]
        assert not any(step.target is aten.slice_backward.default for step in vjp.instructions if isinstance(step, Compute))
        weight = model.weight
        compiled = adjcomp.compile(model, mem_budget="1GiB", chunk=5)
        compiled(x).sum().backward()
        got = weight.grad
        weight.grad = None
        model(x).sum().backward()
        assert (got - weight.grad).norm() <= (2e-2 if dtype is torch.bfloat16 else 1e-5) * weight.grad.norm()
