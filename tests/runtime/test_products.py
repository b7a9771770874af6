"""Products of a VJP that add in place, where cotangents are joined or summed."""

from __future__ import annotations

import fidelity
import torch

from adjcomp.ir.program import AccumulateProduct, Compute, Span
from adjcomp.passes.joint import KeepPolicy, split
from adjcomp.passes.pipeline import run_capture
from adjcomp.passes.programs import tile_programs

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
