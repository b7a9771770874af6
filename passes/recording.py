"""Choose the programs that are recorded and replayed, and count what that holds.

Only tiles of residual layers: they are many and alike, while a head is a few large products, and a stem hardly more than one
kernel. Attention reads more and more keys, so no recording of it serves two chunks; experts wait for their numbers of rows. A VJP
that adds to a part of a side's gradient is left out: that part moves from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from adjcomp.ir.program import Compute, Program, TilePrograms
from adjcomp.ir.recording import RecordedPrograms, RecordingPolicy, place_bytes
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.ops.library import NAMESPACE
from adjcomp.passes.sizes import number_of_bytes
from adjcomp.passes.split import Split

if TYPE_CHECKING:
    from adjcomp.passes.cost import CostModel

# Estimates: the processor's time to launch one kernel from Python, and how many of those an op of ours takes, which prepares its
# arguments in Python and launches several kernels.
LAUNCH_SECONDS = 8e-6
OWN_LAUNCHES = 5
READING_BACK = (torch.ops.adjcomp.grouped_linear.default, torch.ops.adjcomp.grouped_linear_vjp.default)
TRAVELLING = (InputKind.STREAM, InputKind.CARRY)


@dataclass(frozen=True)
class _Candidate:
    """A program that could be recorded, with bytes of what is copied to its places and from its results."""

    program: Program
    input_sizes: tuple[int, ...]
    result_bytes: int
    owned_bytes: int


def recorded_programs(model: CostModel, policy: RecordingPolicy, length: int) -> RecordedPrograms:
    """What is recorded at a chunk length."""
    residual = dict.fromkeys(layer.template for layer in model.stack.layers[1:-1] if not layer.stores)
    programs = model.programs(length)
    found = [
        candidate
        for index in residual
        for candidate in _candidates(model.stack.templates[index], model.splits[index], programs[index], length)
        if not _reads_back(candidate.program) and (not policy.only_worth or _is_worth(model, candidate))
    ]
    return RecordedPrograms(
        programs=tuple(candidate.program for candidate in found),
        input_bytes=max((place_bytes(candidate.input_sizes) for candidate in found), default=0),
        pool_bytes=max((candidate.program.workspace_bytes + candidate.owned_bytes for candidate in found), default=0),
        library_bytes=policy.library_bytes,
    )


def _reads_back(program: Program) -> bool:
    """Whether a program reads sizes back from the device, for which no recording waits: the rows that each expert gets."""
    return any(isinstance(step, Compute) and step.target in READING_BACK for step in program.instructions)


def _is_worth(model: CostModel, candidate: _Candidate) -> bool:
    """Whether launching one by one takes longer than running and copying inputs and results (each read and written)."""
    copied = 2 * (sum(candidate.input_sizes) + candidate.result_bytes) / model.rates.bytes_per_second
    work = candidate.program.work
    targets = [step.target for step in candidate.program.instructions if isinstance(step, Compute)]
    own = len([target for target in targets if getattr(target, "namespace", "") == NAMESPACE])
    launches = work.kernels + (OWN_LAUNCHES - 1) * own
    return launches * LAUNCH_SECONDS > model.rates.seconds(work) + copied


def _candidates(template: Template, split: Split | None, programs: TilePrograms, length: int) -> Iterator[_Candidate]:
    placeholders = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    kinds = [entry.kind for entry in template.inputs]
    inputs = _sizes(template, placeholders, kinds, length)
    results = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
    pairs = zip(template.outputs, results, strict=True)
    made = sum(_bytes(template, n, length) for o, n in pairs if o.kind in (OutputKind.STREAM, OutputKind.CARRY))
    yield _Candidate(programs.forward, inputs, made, 0)
    if programs.keeping is not None:
        yield _Candidate(programs.keeping, inputs, made + programs.saved_bytes, 0)
    if split is None or programs.vjp is None or _adds_to_sides(template, programs):
        return
    placeholders = [n for n in split.backward.nodes if n.op == "placeholder"]
    kinds = [template.inputs[i].kind for i in programs.reads]
    own = _sizes(template, placeholders[len(kinds) :], [], length)
    read = _sizes(template, placeholders[: len(kinds)], kinds, length)
    travelling = sum(_bytes(template, n, length) for n, i in _gradients(split) if template.inputs[i].kind in TRAVELLING)
    yield _Candidate(programs.vjp, (*read, *own), travelling, sum(own))


def _gradients(split: Split) -> Iterator[tuple[fx.Node, int]]:
    results = next(n for n in split.backward.nodes if n.op == "output").args[0]
    return zip(results, split.joint.gradients, strict=True)


def _sizes(template: Template, nodes: Sequence[fx.Node], kinds: Sequence[InputKind], length: int) -> tuple[int, ...]:
    """Bytes of the inputs that are copied: all but parameters, which stay where they are. `kinds`: of the first nodes."""
    known: list[Any] = [*kinds, *[None] * (len(nodes) - len(kinds))]
    return tuple(_bytes(template, n, length) for n, kind in zip(nodes, known, strict=True) if kind is not InputKind.PARAMETER)


def _bytes(template: Template, node: fx.Node, length: int) -> int:
    return number_of_bytes(node.meta["val"], template.time, length)


def _adds_to_sides(template: Template, programs: TilePrograms) -> bool:
    return any(template.inputs[i].kind is InputKind.SIDE for i in programs.gradients)
