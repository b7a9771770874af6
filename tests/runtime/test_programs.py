"""Programs of tiles: what they free, what they need, and that the runtime needs exactly that."""

from __future__ import annotations

import fidelity
import pytest
import torch

from adjcomp.ir.program import AccumulateProduct, AccumulateRows, Accumulator, Compute
from adjcomp.passes.lastuse import reads_of
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.split import KeepPolicy, split
from adjcomp.runtime.codegen import compile_program
from adjcomp.runtime.memory import StorageTracker


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def captured(request: pytest.FixtureRequest) -> Captured:
    ids = fidelity.tokens(2, 16)
    return run_capture(fidelity.FAMILIES[request.param](), (), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("policy", list(KeepPolicy))
def test_every_slot_is_freed_once_and_never_read_after(captured: Captured, policy: KeepPolicy) -> None:
    """Given every tile's programs, when they are replayed, then no slot is read before it exists or after it is freed."""
    for template, joint in zip(captured.stack.templates, captured.joints, strict=True):
        assert joint is not None
        programs = tile_programs(template, split(joint, policy), 24)
        for program in (programs.forward, programs.keeping, programs.vjp):
            assert program is not None
            live = set(program.inputs)
            for step in program.instructions:
                assert set(reads_of(step)) <= live, program.name
                if isinstance(step, Compute):
                    live.add(step.result)
                assert set(step.frees) <= live, program.name
                live -= set(step.frees)
            assert live == (set(program.inputs) - program.owned) | {slot for slot in program.outputs if slot is not None}


@pytest.mark.parametrize("policy", list(KeepPolicy))
@pytest.mark.parametrize("length", [1, 7, 64])
def test_the_predicted_workspace_is_what_running_takes(captured: Captured, policy: KeepPolicy, length: int) -> None:
    """Given a forward program, when it runs on tensors of its shapes, then the tracked peak is its workspace to the byte."""
    for template, joint in zip(captured.stack.templates, captured.joints, strict=True):
        assert joint is not None
        program = tile_programs(template, split(joint, policy), length).keeping
        assert program is not None
        tracker = StorageTracker(0)
        inputs = []
        for node in (n for n in template.graph.graph.nodes if n.op == "placeholder"):
            value = node.meta["val"]
            shape = [size if isinstance(size, int) else length for size in value.shape]
            inputs.append(torch.zeros(shape, dtype=value.dtype))
        results = compile_program(program, "cpu")(inputs, [], tracker)
        assert tracker.peak_bytes == program.workspace_bytes
        del results
        assert tracker.live_bytes == 0


def test_weight_gradients_are_added_in_place(captured: Captured) -> None:
    """Given the VJP of a layer, then the gradients of its matrices are products added to the accumulator, never held."""
    joint = captured.joints[1]
    assert joint is not None
    vjp = tile_programs(captured.stack.templates[1], split(joint, KeepPolicy.LEAN), 32).vjp
    assert vjp is not None
    assert sum(isinstance(step, AccumulateProduct) for step in vjp.instructions) >= 2


def test_lean_tiles_keep_at_most_twelve_widths_a_token(captured: Captured) -> None:
    """Given blocks with expand 2, when they are kept lean, then at most 12 · width elements a token are held, input included."""
    width, length, batch = 32, 1024, 2
    joint = captured.joints[1]
    assert joint is not None
    template = captured.stack.templates[1]
    lean = tile_programs(template, split(joint, KeepPolicy.LEAN), length).saved_bytes
    full = tile_programs(template, split(joint, KeepPolicy.FULL), length).saved_bytes
    states = _state_bytes(captured, length)
    assert (lean - states) / (4 * length * batch * width) + 1 <= 12
    assert lean < full


def _state_bytes(captured: Captured, length: int) -> int:
    """Bytes of the block states that recurrences keep, which grow with the state, not with the width."""
    joint = captured.joints[1]
    assert joint is not None
    program = tile_programs(captured.stack.templates[1], split(joint, KeepPolicy.LEAN), length).keeping
    assert program is not None
    saved = set(program.outputs[len(captured.stack.templates[1].outputs) :])
    graph = split(joint, KeepPolicy.LEAN).forward
    results = list(next(n for n in graph.nodes if n.op == "output").args[0])[len(captured.stack.templates[1].outputs) :]
    assert len(results) == len(saved)
    total = 0
    for node in results:
        value = node.meta["val"]
        if value.ndim >= 4:
            shape = [s if isinstance(s, int) else int(s.node.expr.xreplace({captured.traced.time: length})) for s in value.shape]
            total += torch.Size(shape).numel() * value.element_size()
    return total


def test_gradients_of_tables_are_never_held_whole(captured: Captured) -> None:
    """Given embedding and head, then their VJPs add to the accumulators: no value of (vocabulary, width) is made."""
    first, last = captured.joints[0], captured.joints[-1]
    assert first is not None
    assert last is not None
    embedding = tile_programs(captured.stack.templates[0], split(first, KeepPolicy.LEAN), 8).vjp
    head = tile_programs(captured.stack.templates[-1], split(last, KeepPolicy.LEAN), 8).vjp
    assert embedding is not None
    assert head is not None
    assert any(isinstance(step, AccumulateRows) for step in embedding.instructions)
    assert any(isinstance(a, Accumulator) for s in head.instructions if isinstance(s, Compute) for a in s.args)
    vocabulary_bytes = 4 * 61 * 32
    assert embedding.workspace_bytes < vocabulary_bytes
