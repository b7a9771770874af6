"""Ranges of time joined by summaries: every state, adjoint state and gradient is that of the run in order."""

from __future__ import annotations

import functools

import fidelity
import generated
import joinable_stacks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joined_layers import LayerRuns, captured, classified, errors
from torch import nn

from adjcomp.ir.joining import CarryKind
from adjcomp.ir.variant import Variant
from adjcomp.passes.joinable import Joinable, NotJoinable
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.passes.split import KeepPolicy

USERS = [*joinable_stacks.JOINABLE, *generated.MIXERS]
KINDS = {"Dense": {CarryKind.VECTOR}, "delta": {CarryKind.MATRIX}, "conv": {CarryKind.HALO}, "shift": {CarryKind.HALO}}
STEPS = {"TwoWindows": 5, "GatedRecurrence": 3, "ShiftedScan": 1, "Dense": 0, "ssd": 0}


@functools.cache
def users() -> tuple[nn.Module, Captured]:
    """A float64 stack with every kind of layer, captured at batch 2."""
    x = torch.rand(2, 32, 4, dtype=torch.float64)
    model = joinable_stacks.Stack(*joinable_stacks.JOINABLE.values())
    return model, captured(model, x, torch.rand_like(x).requires_grad_())


@functools.cache
def mixers() -> tuple[nn.Module, Captured]:
    """A float64 stack with every mixer, captured at batch 2."""
    blocks = tuple(generated.BlockSpec(name, gate=True, dropout=True) for name in generated.MIXERS)
    model = generated.build(generated.StackSpec(blocks, tokens=False))
    return model, captured(model, torch.rand(2, 32, 4, dtype=torch.float64))


def user(name: str) -> tuple[nn.Module, Captured, int]:
    """A model, and which of its layers has this name."""
    if name in generated.MIXERS:
        return *mixers(), 1 + generated.MIXERS.index(name)
    return *users(), 1 + list(joinable_stacks.JOINABLE).index(name)


@functools.cache
def family(name: str) -> tuple[nn.Module, Captured]:
    """A small model of transformers, float32."""
    model = fidelity.FAMILIES[name]()
    ids = fidelity.tokens(2, 64)
    return model, captured(model, input_ids=ids, labels=ids)


@st.composite
def cuts(draw: st.DrawFn, least: int) -> tuple[int, int, list[int]]:
    """Steps, chunk length and the chunks at which ranges begin."""
    length = draw(st.integers(max(1, least), max(1, least) + 12))
    chunks = draw(st.integers(2, 6))
    steps = (chunks - 1) * length + draw(st.integers(1, length))
    return steps, length, [0, *sorted(draw(st.sets(st.integers(1, chunks - 1), min_size=1)))]


@pytest.mark.parametrize("name", USERS)
def test_joined_ranges_give_what_the_sequence_gives(name: str) -> None:
    """Given a layer, when any ranges of any chunks are joined, then nothing differs by more than rounding in float64."""
    model, found, layer = user(name)
    classes = classified(found, layer)
    assert isinstance(classes, Joinable)

    @settings(max_examples=max(3, settings().max_examples // 5))
    @given(cuts(classes.steps), st.sampled_from(KeepPolicy))
    def run(cut: tuple[int, int, list[int]], policy: KeepPolicy) -> None:
        steps, length, borders = cut
        off = errors(LayerRuns(found, model, steps, length, policy, layer), borders)
        assert max(off.values()) <= 1e-12, off

    run()


@pytest.mark.parametrize("name", ["mamba", "mamba2", pytest.param("falcon_mamba", marks=pytest.mark.slow)])
def test_models_of_transformers_join(name: str) -> None:
    model, found = family(name)
    off = errors(LayerRuns(found, model, 37, 5, KeepPolicy.LEAN), [0, 2, 3, 6])
    assert max(off.values()) <= 1e-5, off


@pytest.mark.parametrize("name", ["mamba2", pytest.param("mamba", marks=pytest.mark.slow)])
def test_half_precision_differs_by_its_rounding(name: str) -> None:
    """Given bfloat16 weights, then states, which are float32, agree far better than bfloat16 could."""
    model = fidelity.FAMILIES[name]().to(torch.bfloat16)
    ids = fidelity.tokens(1, 64)
    found = captured(model, input_ids=ids, labels=ids)
    off = errors(LayerRuns(found, model, 37, 8, KeepPolicy.LEAN), [0, 2, 3])
    assert max(off["states"], off["adjoints"]) <= 1e-3, off
    assert max(off.values()) <= 1e-2, off


def test_states_are_classified() -> None:
    """Given layers of every kind, then each state is what it is, and halos look back over all convolutions in a row."""
    for name, kinds in KINDS.items():
        classes = classified(*user(name)[1:])
        assert isinstance(classes, Joinable)
        assert {rule.kind for rule in classes.rules} == kinds, name
    for name, steps in STEPS.items():
        classes = classified(*user(name)[1:])
        assert isinstance(classes, Joinable)
        assert classes.steps == steps, name


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (joinable_stacks.Chained, "linear_scan depends in its decay or inputs on what linear_scan makes"),
        (joinable_stacks.WindowAfter, "causal_conv1d looks back on what linear_scan makes"),
    ],
)
def test_a_layer_that_does_not_join_says_why(layer: type[nn.Module], reason: str) -> None:
    found = classified(captured(joinable_stacks.Stack(layer), torch.rand(1, 32, 4, dtype=torch.float64)))
    assert isinstance(found, NotJoinable)
    assert reason in found.reason
    assert "layers.0" in found.reason


def test_a_truncated_adjoint_does_not_join() -> None:
    model = joinable_stacks.Stack(joinable_stacks.ShiftedScan)
    found = run_capture(model, (torch.rand(1, 32, 4, dtype=torch.float64),), {}, variant=Variant(adjoint_window=8))
    classes = classified(found)
    assert isinstance(classes, NotJoinable)
    assert "window of 8 steps" in classes.reason


@pytest.mark.parametrize("layer", [0, -1])
def test_stem_and_head_join_too(layer: int) -> None:
    """Given states below the first border and above the last one, then their ranges join as those of layers do."""
    model, found = _around()
    off = errors(LayerRuns(found, model, 23, 6, KeepPolicy.LEAN, layer), [0, 1, 3])
    assert max(off.values()) <= 1e-12, off


@functools.cache
def _around() -> tuple[nn.Module, Captured]:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.stack = nn.Embedding(7, 4), joinable_stacks.Stack(joinable_stacks.ShiftedScan)
            self.first, self.last = joinable_stacks.taps(4, 3), joinable_stacks.GatedRecurrence(3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.last(self.stack(joinable_stacks.causal(self.first, self.embed(ids))))

    torch.manual_seed(0)
    model = Around().double()
    return model, captured(model, torch.randint(0, 7, (2, 32)))


@pytest.mark.slow
def test_padding_frozen_layers_and_autocast_join() -> None:
    """Given values from the side, layers whose input takes no cotangent, or autocast, then ranges join as before."""
    ids = fidelity.tokens(2, 64)
    model = fidelity.mamba()
    padded = captured(model, input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    assert max(errors(LayerRuns(padded, model, 37, 5, KeepPolicy.LEAN), [0, 2, 6]).values()) <= 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        mixed = captured(model, input_ids=ids, labels=ids)
    off = errors(LayerRuns(mixed, model, 37, 5, KeepPolicy.LEAN), [0, 2, 6])
    assert max(off["states"], off["adjoints"]) <= 1e-5, off
    assert max(off.values()) <= 1e-3, off
    for parameter in model.backbone.layers[:2].parameters():
        parameter.requires_grad_(False)
    model.backbone.embeddings.requires_grad_(False)
    frozen = captured(model, input_ids=ids, labels=ids)
    assert max(errors(LayerRuns(frozen, model, 37, 5, KeepPolicy.LEAN, 3), [0, 2, 6]).values()) <= 1e-5
