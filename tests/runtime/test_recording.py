"""Recorded tiles: replays give the bits that running gives, whatever moves, and their memory is in the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import fidelity
import generated
import pytest
import torch
from fidelity import Gradients, measure
from generated import BlockSpec, CallSpec, StackSpec
from hypothesis import given, settings
from recorders import RepeatingRecorder, recording_on_cpu
from torch import nn

import adjcomp
from adjcomp.ir.program import Compute, Program, Slot, Work
from adjcomp.ir.recording import RESIDENT_KIND, RecordedPrograms, RecordingPolicy
from adjcomp.machine import profile_device
from adjcomp.passes.cost import CostModel, Outside, Rates, device_rates
from adjcomp.passes.pipeline import run_capture
from adjcomp.passes.split import KeepPolicy
from adjcomp.runtime.codegen import compile_program
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.recording import Call, Recording, Recordings, Results

ON, OFF = adjcomp.Options(cuda_graphs=True, deterministic=True), adjcomp.Options(cuda_graphs=False, deterministic=True)
IDS = fidelity.tokens(2, 38)


@pytest.fixture
def recorder() -> Iterator[type[RepeatingRecorder]]:
    with recording_on_cpu() as found:
        yield found


def same(got: Gradients, want: Gradients) -> bool:
    """Bit for bit."""
    pairs = zip(got.grads.values(), want.grads.values(), strict=True)
    equal = all(g is w if g is None or w is None else torch.equal(g, w) for g, w in pairs)
    return equal and torch.equal(got.loss, want.loss)


def small() -> nn.Module:
    """A model that is traced quickly."""
    return fidelity.diagonal_stack(layers=3, vocab=61)


def weighted(length: int) -> fidelity.Call:
    """A loss on the model's outputs for the first `length` tokens."""
    weights = torch.randn(2, length, 61, generator=torch.Generator().manual_seed(0))
    return lambda model: (model(IDS[:, :length]) * weights).sum()


CALL = weighted(38)


@pytest.mark.parametrize(("family", "tight"), [("mamba", True), ("mamba2", False)])
def test_training_with_replays_gives_the_same_bits(recorder: type[RepeatingRecorder], family: str, tight: bool) -> None:
    """Given steps with changing parameters and a shorter last chunk, when tiles are replayed, then nothing differs."""
    models = [fidelity.FAMILIES[family](num_hidden_layers=2) for _ in range(2)]
    call = fidelity.next_token(IDS)
    budgets: list[int | None] = [None, None]
    if tight:  # recomputation: programs run with and without keeping
        budgets = [int(1.1 * smallest(model, call, options)) for model, options in zip(models, (ON, OFF), strict=True)]
    pairs = zip(models, budgets, (ON, OFF), strict=True)
    replayed, launched = (adjcomp.compile(m, mem_budget=b, chunk=5, options=o) for m, b, o in pairs)
    for step in range(2):
        for view in (replayed, launched):
            view.zero_grad(set_to_none=True)
            call(view).backward()
        grads = [Gradients(torch.zeros(()), {n: p.grad for n, p in model.named_parameters()}) for model in models]
        assert same(*grads), step
        assert replayed.stats.measured_peak_bytes <= replayed.stats.predicted_peak_bytes <= replayed.stats.budget_bytes
        assert replayed.stats.replayed_tiles >= (15 if step else 8)
        assert launched.stats.replayed_tiles == 0
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert replayed.plan.costs.resident_bytes[RESIDENT_KIND] > 0
    assert RESIDENT_KIND not in launched.plan.costs.resident_bytes
    assert not tight or any(isinstance(action, adjcomp.ir.actions.Recompute) for action in replayed.plan.actions)


def smallest(model: nn.Module, call: fidelity.Call, options: adjcomp.Options) -> int:
    with pytest.raises(adjcomp.BudgetError) as caught:
        call(adjcomp.compile(model, mem_budget="1KiB", chunk=5, options=options))
    return caught.value.minimum_bytes


@pytest.mark.slow
@settings(max_examples=20)
@given(spec=generated.stacks(), call=generated.calls())
def test_random_stacks_give_the_same_bits(spec: StackSpec, call: CallSpec) -> None:
    """Given any stack and call, when it runs twice with replays, then gradients are those without."""
    run = generated.call_of(spec, call)
    with recording_on_cpu():
        found = []
        for options in (ON, OFF):
            model = generated.build(spec)
            compiled = adjcomp.compile(model, chunk=call.chunk, options=options)
            if not any(p.requires_grad for p in model.parameters()):
                return
            found.append([measure(model, lambda compiled=compiled: run(compiled)) for _ in range(2)])
    for got, want in zip(*found, strict=True):
        assert same(got, want)


def test_random_numbers_are_those_of_each_chunk(recorder: type[RepeatingRecorder]) -> None:
    """Given dropout, when tiles are replayed, then seeds and positions are inputs of every replay."""
    spec, call = StackSpec((BlockSpec("selective", dropout=True),) * 2), CallSpec(2, 23, chunk=3)
    run = generated.call_of(spec, call)
    found = []
    for options in (ON, OFF):
        model = generated.build(spec)
        compiled = adjcomp.compile(model, chunk=3, options=options)
        found.append([measure(model, lambda compiled=compiled: run(compiled)) for _ in range(2)])
    assert all(itertools.starmap(same, zip(*found, strict=True)))
    assert recorder.made > 0


def test_moved_parameters_are_recorded_again(recorder: type[RepeatingRecorder]) -> None:
    """Given a recorded layer, when its parameters get other storage, then the next step reads that."""
    model = small()
    compiled, fresh = adjcomp.compile(model, chunk=4, options=ON), adjcomp.compile(model, chunk=4, options=OFF)
    measure(model, lambda: CALL(compiled))
    before = recorder.made
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    assert same(measure(model, lambda: CALL(compiled)), measure(model, lambda: CALL(fresh)))
    assert recorder.made > before
    assert compiled.stats.replayed_tiles > 0


def test_other_lengths_and_evaluation_between(recorder: type[RepeatingRecorder]) -> None:
    """Given steps of several lengths and a call without gradients between, then each gives what it gives alone."""
    model = small()
    compiled, fresh = adjcomp.compile(model, chunk=4, options=ON), adjcomp.compile(model, chunk=4, options=OFF)
    for length in (38, 30, 38, 17, 38):
        call = weighted(length)
        assert same(measure(model, lambda call=call: call(compiled)), measure(model, lambda call=call: call(fresh)))
        assert compiled.stats.replayed_tiles > 0
        with torch.no_grad():
            torch.testing.assert_close(call(compiled), call(fresh), rtol=0, atol=0)


def test_steps_that_overlap(recorder: type[RepeatingRecorder]) -> None:
    """Given two forwards of different lengths, when both backwards run after them, then gradients are the sums of both."""
    model = small()
    found = []
    for options in (ON, OFF):
        compiled = adjcomp.compile(model, chunk=4, options=options)
        both = [weighted(length) for length in (38, 21)]
        found.append(measure(model, lambda compiled=compiled, both=both: both[0](compiled) + both[1](compiled)))
    assert same(*found)


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    """Given a device that refuses, when a step runs, then it runs, and asks once a program."""
    model = small()
    fresh = measure(model, lambda: CALL(adjcomp.compile(model, chunk=4, options=OFF)))
    with recording_on_cpu(refuses=True):
        compiled = adjcomp.compile(model, chunk=4, options=ON)
        assert same(measure(model, lambda: CALL(compiled)), fresh)
        assert compiled.stats.replayed_tiles == 0


class Greedy(RepeatingRecorder):
    """Runs what it records, as a graph allocates while it is captured."""

    def record(self, run: Callable[[], Results]) -> Recording:
        run()
        return super().record(run)


@pytest.mark.parametrize(("counted", "recorded"), [((512, 12), True), ((511, 12), False), ((512, 11), False)])
def test_a_recording_that_takes_more_than_was_counted_is_not_used(counted: tuple[int, int], recorded: bool) -> None:
    """Given a plan that counts too little for places or pool, when a program runs again, then it isn't recorded."""
    copy = Compute(torch.ops.aten.clone.default, (Slot(0),), {}, Slot(1), allocates=True)
    program = Program("copy", (Slot(0),), frozenset(), (copy,), (Slot(1),), 12, Work())
    recordings = Recordings(Greedy(torch.device("cpu")), torch.device("cpu"), RecordedPrograms((program,), *counted, 0))
    calls = [Call(program, 1, [torch.full((3,), float(i))], [False], []) for i in range(3)]
    found = [recordings.run(call, StorageTracker(0)) for call in calls]
    assert found[0] is None  # it runs as it is the first time
    for i in (1, 2):
        assert (found[i] is not None) is recorded
        assert len(calls[i].arguments) == 1 - recorded
        assert not recorded or torch.equal(found[i][0], torch.full((3,), float(i)))


def test_a_budget_without_room_for_recordings(recorder: type[RepeatingRecorder]) -> None:
    """Given the smallest budget, when nobody asks for recordings, then there are none; when they are asked for, no plan fits."""
    model = small()
    needed = smallest(model, CALL, OFF)
    left_open = adjcomp.compile(model, mem_budget=needed, chunk=5)
    measure(model, lambda: CALL(left_open))
    assert left_open.stats.replayed_tiles == 0
    with pytest.raises(adjcomp.BudgetError) as caught:
        CALL(adjcomp.compile(model, mem_budget=needed, chunk=5, options=ON))
    assert caught.value.minimum_bytes > needed


def test_a_saved_plan_replays_what_it_counts(recorder: type[RepeatingRecorder]) -> None:
    """Given a saved plan with recordings, when it is run, then tiles are replayed; one without runs without."""
    model = small()
    for options, replays in ((ON, True), (OFF, False)):
        compiled = adjcomp.compile(model, chunk=4, options=options)
        want = measure(model, lambda compiled=compiled: CALL(compiled))
        saved = adjcomp.Plan.from_json(compiled.plan.to_json())
        again = adjcomp.compile(model, plan=saved, options=ON)
        assert same(measure(model, lambda again=again: CALL(again)), want)
        assert (again.stats.replayed_tiles > 0) is replays


def test_what_launches_faster_than_it_runs_is_left_alone() -> None:
    """Given nobody's wish, when a device is fast, then tiles are recorded; not when they take longer than their launches."""
    captured = run_capture(small(), (IDS,), {})
    outside = Outside({}, {}, (0,) * len(captured.stack.layers))
    splits, policy = captured.splits(KeepPolicy.LEAN), RecordingPolicy(only_worth=True, library_bytes=0)
    for rates, count in ((Rates(1e15, 1e15, 1e13, 1e-6), 3), (Rates(1e9, 1e9, 1e9, 1e-3), 0)):
        recorded = CostModel(captured.stack, splits, 38, outside, rates, KeepPolicy.LEAN, recording=policy).recorded(16)
        assert (0 if recorded is None else len(recorded.programs)) == count


def test_a_plan_for_another_machine_counts_recordings_that_are_asked_for() -> None:
    """Given a GPU that isn't here, when recordings are asked for, then the plan counts them, and otherwise doesn't."""
    model = small()
    for wanted, counted in ((True, True), (None, False)):
        options = adjcomp.Options(cuda_graphs=wanted)
        plan = adjcomp.plan(model, seq_len=256, machine="a100-40gb", example_inputs=(IDS[:, :16],), options=options)
        assert (plan.bytes_by_kind.get(RESIDENT_KIND, 0) > 0) is counted


@pytest.mark.parametrize("policy", list(KeepPolicy))
def test_the_counted_bytes_bound_what_programs_take(policy: KeepPolicy) -> None:
    """Given recorded programs, when they run on inputs that stay, then they allocate no more than the pool."""
    captured = run_capture(fidelity.mamba2(), (), {"input_ids": IDS, "labels": IDS})
    outside = Outside({}, {}, (0,) * len(captured.stack.layers))
    rates = device_rates(profile_device("cpu", name="cpu"))
    recording = RecordingPolicy(only_worth=False, library_bytes=0)
    model = CostModel(captured.stack, captured.splits(policy), 38, outside, rates, policy, recording=recording)
    recorded = model.recorded(16)
    assert recorded is not None
    assert len(recorded.programs) == 3
    template = captured.stack.templates[captured.stack.layers[1].template]
    inputs = [
        torch.zeros([n if isinstance(n, int) else 16 for n in node.meta["val"].shape], dtype=node.meta["val"].dtype)
        for node in template.graph.graph.nodes
        if node.op == "placeholder"
    ]
    for program in recorded.programs[:2]:
        tracker = StorageTracker(0)
        compile_program(program, "cpu")(list(inputs), [], tracker)
        assert 0 < tracker.peak_bytes <= recorded.pool_bytes


@pytest.mark.parametrize("wrong", [1, "yes", 0.0])
def test_the_option_is_checked(wrong: object) -> None:
    with pytest.raises(TypeError, match="cuda_graphs must be True, False or None"):
        adjcomp.Options(cuda_graphs=wrong)  # type: ignore[arg-type]
