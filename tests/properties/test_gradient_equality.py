"""The one invariant, on random models, shapes, chunk lengths and budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fidelity import FAMILIES, compare, distance, measure, next_token, tightest, tokens
from generated import CallSpec, StackSpec, build, call_of, calls, inputs_of, stacks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import adjcomp

EXAMPLES = settings().max_examples
SOME, FEW = settings(max_examples=max(1, EXAMPLES // 2)), settings(max_examples=max(1, EXAMPLES // 3))


@SOME
@given(stacks(), calls())
def test_gradients_of_random_stacks_are_exact_in_float64(spec: StackSpec, call: CallSpec) -> None:
    """Given any stack, shape and chunk length, loss and gradients equal plain autograd's to 1e-10."""
    model = build(spec)
    compare(model, adjcomp.compile(model, chunk=call.chunk), call_of(spec, call), 1e-10)


@FEW
@given(stacks(), calls())
def test_gradients_of_random_stacks_are_as_good_as_plains_in_float32(spec: StackSpec, call: CallSpec) -> None:
    """In float32, no farther from the float64 gradients than 1e-5, or than a few times plain's own distance."""
    exact_model, model = build(spec), build(spec, torch.float32)
    exact = measure(exact_model, lambda: call_of(spec, call)(exact_model))
    run = call_of(spec, call, torch.float32)
    errors = []
    for candidate in (model, adjcomp.compile(model, chunk=call.chunk)):
        found = measure(model, lambda candidate=candidate: run(candidate))
        wide = {name: None if g is None else g.double() for name, g in found.grads.items()}
        errors.append(distance(type(found)(found.loss, wide), exact))
    assert errors[1] <= 3 * errors[0] + 1e-5


@FEW
@given(stacks(dropout=True), calls(), st.integers(1, 24))
def test_chunk_length_changes_nothing(spec: StackSpec, call: CallSpec, other: int) -> None:
    """Given dropout and one seed, two chunk lengths give one loss and one gradient."""
    model, run = build(spec), call_of(spec, call)
    first, second = (
        measure(model, lambda chunk=chunk: run(adjcomp.compile(model, chunk=chunk))) for chunk in (call.chunk, other)
    )
    assert distance(second, first) <= 1e-10
    torch.testing.assert_close(second.loss, first.loss, rtol=1e-12, atol=1e-12)


@FEW
@given(stacks(dropout=True), calls(), st.floats(1.0, 3.0))
def test_budget_changes_nothing(spec: StackSpec, call: CallSpec, room: float) -> None:
    """Given dropout and one seed, the tightest budget, a larger one and none give one gradient and leave one generator state."""
    model, run = build(spec), call_of(spec, call)
    smallest = tightest(model, run)
    found, states = [], []
    for budget in (None, smallest, int(room * smallest)):
        compiled = adjcomp.compile(model, mem_budget=budget)
        found.append(measure(model, lambda compiled=compiled: run(compiled)))
        states.append(torch.get_rng_state())
    assert all(distance(each, found[0]) <= 1e-10 for each in found)
    assert all(torch.equal(state, states[0]) for state in states)


@FEW
@given(stacks(), calls(), st.integers(0, 22))
def test_a_stream_in_two_pieces_is_the_whole(spec: StackSpec, call: CallSpec, place: int) -> None:
    """Given any stack and a place to cut, two calls with the state handed on give the outputs and gradients of one."""
    spec = replace(spec, loss="outer")
    model = build(spec)
    x, _, weights = inputs_of(spec, call)
    compiled = adjcomp.compile(model, chunk=call.chunk)

    def pieces() -> Tensor:
        first, rest = x.tensor_split([1 + place % (call.length - 1)], 1)
        start, state = compiled(first, initial_state=None)
        end, _ = compiled(rest, initial_state=state)
        return (torch.cat([start, end], 1) * weights).sum()

    def whole() -> Tensor:
        return (model(x) * weights).sum()

    assert distance(measure(model, pieces), measure(model, whole)) <= 1e-10


@FEW
@given(stacks(), calls(64), st.floats(1.0, 4.0))
def test_the_predicted_peak_is_the_measured_one(spec: StackSpec, call: CallSpec, room: float) -> None:
    """Given any budget that fits, what the plan predicts is what is live, and within the budget."""
    model, run = build(spec), call_of(spec, call)
    budget = int(room * tightest(model, run, call.chunk))
    compiled = adjcomp.compile(model, mem_budget=budget, chunk=call.chunk)
    measure(model, lambda: run(compiled))
    compiled.plan.verify()
    stats = compiled.stats
    assert stats.measured_peak_bytes <= stats.budget_bytes == budget
    assert abs(stats.predicted_peak_bytes - stats.measured_peak_bytes) <= 0.01 * stats.measured_peak_bytes + 2**10


@FEW
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 3), st.integers(2, 70), st.integers(1, 33), st.booleans())
def test_library_models_are_exact(family: str, batch: int, length: int, chunk: int, tied: bool) -> None:
    """Given a family of transformers, any batch, length and chunk, gradients equal the untouched model's."""
    model = FAMILIES[family](num_hidden_layers=2, tie_word_embeddings=tied)
    compare(model, adjcomp.compile(model, chunk=chunk), next_token(tokens(batch, length, seed=length)))


@pytest.mark.slow
@settings(max_examples=2000)
@given(stacks(), calls(40), st.booleans())
def test_fuzz(spec: StackSpec, call: CallSpec, tight: bool) -> None:
    """The first property with many examples, half of them under their tightest budget."""
    model, run = build(spec), call_of(spec, call)
    budget = tightest(model, run, call.chunk) if tight else None
    compare(model, adjcomp.compile(model, mem_budget=budget, chunk=call.chunk), run, 1e-10)
