"""Layer-major plans of real models: the same gradients, and the memory that was promised."""

from __future__ import annotations

import fidelity
import pytest
import torch
from attending import hybrid
from fidelity import compare, next_token, tokens
from generated import CallSpec, StackSpec, build, call_of, calls, stacks
from hypothesis import given, settings
from hypothesis import strategies as st

import adjcomp
from adjcomp.ir.modes import bottom_layer
from adjcomp.ir.order import segments_of
from adjcomp.ir.plan import Plan
from adjcomp.passes.layermajor import Segment, emit_layer_major
from adjcomp.passes.schedule.search import build_plan

FEW = settings(max_examples=max(1, settings().max_examples // 6))
ROOMY = 1 << 40


def in_segments(plan: Plan, cuts: int, held: int) -> Plan:
    """A plan like `plan` whose layers are cut wherever `cuts` has a bit, and hold internals wherever `held` has one."""
    costs, segments, first = plan.costs, [], 0
    for layer in range(costs.head + 1):
        if layer == costs.head or (layer >= bottom_layer(costs) and cuts >> layer & 1):
            segments.append(Segment(first, layer, bool(held >> len(segments) & 1)))
            first = layer + 1
    made = build_plan(costs, emit_layer_major(costs, segments), ROOMY, plan.shares[0].name)
    made.verify()
    return made


@FEW
@given(stacks(dropout=True), calls(), st.integers(0, 1 << 8), st.integers(0, 1 << 8))
def test_the_order_changes_no_gradient(spec: StackSpec, call: CallSpec, cuts: int, held: int) -> None:
    """Given any stack, with dropout and shared weights, when run in segments of layers, then loss and gradients are those of the
    time-major plan."""
    model, run = build(spec), call_of(spec, call)
    compiled = adjcomp.compile(model, chunk=call.chunk)
    torch.manual_seed(1)
    expected = fidelity.measure(model, lambda: run(compiled))
    segmented = adjcomp.compile(model, plan=in_segments(compiled.plan, cuts, held))
    torch.manual_seed(1)
    found = fidelity.measure(model, lambda: run(segmented))
    assert fidelity.distance(found, expected) <= 1e-10
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert segmented.stats.measured_peak_bytes <= segmented.stats.predicted_peak_bytes


@pytest.mark.parametrize("family", ["mamba", pytest.param("mamba2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_at_the_minimum_layers_come_one_after_the_other(family: str, dtype: torch.dtype) -> None:
    """Given parameters that outweigh a sequence, when compiled at the minimum, then its plan is layer-major, measured as
    predicted, and in float32 exact."""
    model = fidelity.FAMILIES[family](hidden_size=64).to(dtype)
    length = 64
    with pytest.raises(adjcomp.BudgetError) as caught:
        adjcomp.compile(model, mem_budget="1KiB", chunk=16).plan_for(batch_size=1, seq_len=length)
    budget = caught.value.minimum_bytes
    view = adjcomp.compile(model, mem_budget=budget, chunk=16)
    if dtype is torch.float32:
        compare(model, view, next_token(tokens(1, length)))
    else:
        next_token(tokens(1, length))(view).backward()
    assert len(segments_of(view.plan)) > 1
    assert view.stats.measured_peak_bytes == view.stats.predicted_peak_bytes <= budget
    view.plan.verify()


@pytest.mark.slow
def test_attention_runs_layer_by_layer_too() -> None:
    """Given a hybrid, when cut between all of its layers, then gradients are exact and memory is as predicted."""
    model, ids = hybrid(), tokens(2, 23, vocab=31)
    compiled = adjcomp.compile(model, chunk=6)
    compare(model, compiled, lambda m: m(ids).pow(2).sum(), bound=1e-10)
    for cuts, held in ((0b1111, 0), (0b0010, 0b01)):
        segmented = adjcomp.compile(model, plan=in_segments(compiled.plan, cuts, held))
        compare(model, segmented, lambda m: m(ids).pow(2).sum(), bound=1e-10)
        assert segmented.stats.measured_peak_bytes == segmented.stats.predicted_peak_bytes
