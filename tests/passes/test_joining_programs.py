"""The programs of joined ranges: nothing in them is dead, they leave their arguments alone, and need what they say."""

from __future__ import annotations

import functools

import fidelity
import pytest
import torch

from adjcomp.ir.joining import DerivedProgram, JoinPrograms
from adjcomp.ir.program import Accumulate, AccumulateProduct, AccumulateRows, Compute
from adjcomp.ir.stack import Template
from adjcomp.passes.joinable import Joinable, joinable
from adjcomp.passes.joining import join_graphs, join_programs
from adjcomp.passes.lastuse import reads_of
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.split import KeepPolicy, split
from adjcomp.runtime.codegen import compile_program
from adjcomp.runtime.memory import StorageTracker

LENGTH = 24
WIDTH, INNER, RANK, STATES = 32, 64, 4, 8  # of `fidelity.mamba`


@functools.cache
def captured(family: str) -> Captured:
    ids = fidelity.tokens(1, 32)
    return run_capture(fidelity.FAMILIES[family](), (), {"input_ids": ids, "labels": ids})


def made(family: str) -> tuple[Template, JoinPrograms]:
    """The template of a layer, and what joins its ranges."""
    found = captured(family)
    index = found.stack.layers[1].template
    template, joint = found.stack.templates[index], found.joints[index]
    assert joint is not None
    classes = joinable(template, joint)
    assert isinstance(classes, Joinable)
    return template, join_programs(join_graphs(classes, split(joint, KeepPolicy.LEAN)), LENGTH)


def derived(joins: JoinPrograms) -> list[DerivedProgram]:
    found = [joins.tail, joins.summarize, joins.adjoint_summarize, joins.tail_vjp]
    return [program for program in found if program is not None]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_no_argument_is_taken_over_and_no_slot_lost(family: str) -> None:
    """Given the programs of a layer, when they are replayed, then arguments and results are live at the end, nothing else."""
    _, joins = made(family)
    assert len(derived(joins)) == 4
    for program in (d.program for d in derived(joins)):
        assert program.owned == frozenset()
        live = set(program.inputs)
        for step in program.instructions:
            assert set(reads_of(step)) <= live, program.name
            live |= {step.result} if isinstance(step, Compute) else set()
            assert set(step.frees) <= live, program.name
            live -= set(step.frees)
        assert live == {*program.inputs, *program.outputs}, program.name
        read = {slot for step in program.instructions for slot in reads_of(step)}
        assert set(program.inputs) <= read, program.name


def test_summaries_run_no_gate_and_no_output_projection() -> None:
    """Given a Mamba layer, then the summary costs the forward less gate, readout and output; that of cotangents the output."""
    found = captured("mamba")
    index = found.stack.layers[1].template
    joint = found.joints[index]
    assert joint is not None
    forward = tile_programs(found.stack.templates[index], split(joint, KeepPolicy.LEAN), LENGTH).forward.work
    template, joins = made("mamba")
    assert joins.summarize is not None
    assert joins.adjoint_summarize is not None
    gate, output, readout = WIDTH * INNER, INNER * WIDTH, INNER * STATES
    assert joins.summarize.program.work.flops == forward.flops - 2 * LENGTH * (gate + output + readout)
    assert joins.adjoint_summarize.program.work.flops == 2 * LENGTH * output
    names = found.stack.layers[1].parameters
    read = {names[template.inputs[i].index] for i in joins.summarize.reads if i < len(names)}
    assert not any("out_proj" in name or name.endswith(".D") for name in read)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_summaries_of_cotangents_make_no_gradient(family: str) -> None:
    """Given the summary of cotangents, then it adds to no accumulator and reads no cotangent of a halo."""
    template, joins = made(family)
    program = joins.adjoint_summarize
    assert program is not None
    adds = Accumulate | AccumulateProduct | AccumulateRows
    assert not any(isinstance(step, adds) for step in program.program.instructions)
    halos = [o for o, rule in zip(template.outputs[1:], joins.rules, strict=True) if not rule.is_linear]
    assert not any(template.outputs[i] in halos for i in program.cotangents)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_predicted_workspace_is_what_running_takes(family: str) -> None:
    """Given tail and summary, when they run on tensors of their shapes, then the tracked peak is their workspace to the byte."""
    template, joins = made(family)
    placeholders = [n.meta["val"] for n in template.graph.graph.nodes if n.op == "placeholder"]
    for program, length in ((joins.tail, joins.steps), (joins.summarize, LENGTH)):
        assert program is not None
        shapes = [([s if isinstance(s, int) else length for s in v.shape], v.dtype) for v in placeholders]
        arguments = [torch.zeros(shapes[i][0], dtype=shapes[i][1]) for i in program.reads]
        arguments += [torch.zeros(joins.rules[i].product_shape, dtype=joins.rules[i].dtype) for i in program.products]
        tracker = StorageTracker(0)
        results = compile_program(program.program, "cpu")(arguments, [], tracker)
        assert tracker.peak_bytes == program.program.workspace_bytes
        assert len(results) == len(program.carries) + len(program.products)
