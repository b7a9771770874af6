"""Time the programs of one tile on the device at hand, with inputs of the right shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from adjcomp.ir.program import Program, TilePrograms
from adjcomp.ir.stack import InputKind, Layer, OutputKind, Template
from adjcomp.runtime.codegen import compile_program
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.sharded import is_sharded
from adjcomp.runtime.values import accumulation_dtype

REPEATS = 3
Tensor = torch.Tensor


@torch.no_grad()
def time_tile(
    template: Template, layer: Layer, programs: TilePrograms, length: int, state: Mapping[str, Tensor]
) -> dict[str, float]:
    """Seconds of "forward", "keeping" and "vjp" (where they exist) at a chunk length of `length` steps: the shortest of a few
    runs.

    Floats are standard normal, integers zero. The layer's own parameters are read, nothing of the model is written.
    """
    placeholders = [n.meta["val"] for n in template.graph.graph.nodes if n.op == "placeholder"]
    inputs = [
        _parameter(state[layer.parameters[entry.index]]) if entry.kind is InputKind.PARAMETER else _example(value, length)
        for entry, value in zip(template.inputs, placeholders, strict=True)
    ]
    forward = _runner(programs.forward, placeholders)
    seconds = {"forward": _shortest(lambda: forward(inputs, []))}
    if programs.keeping is not None and programs.vjp is not None:
        keeping, vjp = _runner(programs.keeping, placeholders), _runner(programs.vjp, placeholders)
        seconds["keeping"] = _shortest(lambda: keeping(inputs, []))
        seconds["forward"] = min(seconds.values())  # the same operations: what a disturbed run says otherwise is noise
        seconds["vjp"] = _shortest(_vjp(template, layer, programs, inputs, keeping, vjp))
    return seconds


def _parameter(parameter: Tensor) -> Tensor:
    """A parameter, or another tensor of its shape where the whole of it isn't here."""
    here = not is_sharded(parameter) and (parameter.numel() < 2 or 0 not in parameter.stride())
    return parameter.detach() if here else _example(parameter, 0)


def _example(value: Tensor, length: int) -> Tensor:
    shape = [size if isinstance(size, int) else length for size in value.shape]
    if value.is_floating_point() or value.is_complex():
        return torch.randn(shape, dtype=value.dtype, device=value.device, generator=_generator(value.device))
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _generator(device: torch.device) -> torch.Generator:
    """Numbers of our own: calibration must not move the user's generator."""
    return torch.Generator(device=device).manual_seed(0)


_Runner = Callable[[list[Tensor], list[Tensor | None]], tuple[Tensor, ...]]


def _runner(program: Program, placeholders: Sequence[Tensor]) -> _Runner:
    """A program as a function that leaves its list of inputs alone."""
    run = compile_program(program, placeholders[0].device.type if placeholders else "cpu")
    return lambda inputs, gradients: run(list(inputs), gradients, StorageTracker(0))


def _cotangent(template: Template, layer: Layer, index: int, output: Tensor) -> Tensor:
    entry = template.outputs[index]
    windowed = layer.carries[entry.index].windowed if entry.kind is OutputKind.CARRY else None
    return torch.ones_like(output) if windowed is None else output.new_ones(windowed)


def _vjp(
    template: Template, layer: Layer, programs: TilePrograms, inputs: list[Tensor], keeping: _Runner, vjp: _Runner
) -> Callable[[], object]:
    results = keeping(inputs, [])
    outputs, saved = results[: len(template.outputs)], results[len(template.outputs) :]
    arguments = [inputs[i] for i in programs.reads] + [outputs[i] for i in programs.reads_outputs] + list(saved)
    arguments += [_cotangent(template, layer, i, outputs[i]) for i in programs.cotangents]
    gradients = [
        torch.zeros_like(inputs[i], dtype=accumulation_dtype(inputs[i].dtype))
        if template.inputs[i].kind in (InputKind.PARAMETER, InputKind.SIDE)
        else None
        for i in programs.gradients
    ]
    return lambda: vjp(arguments, gradients)


def _shortest(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
