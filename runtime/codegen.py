"""From a Program to a Python function: no interpretation on the hot path, every name deleted at its last use.

The function takes `(inputs, gradients, tracker)`: a list of tensors, which it empties, so that an owned input is freed as soon as
it was used; the accumulators by number; and what counts storages. It returns the outputs as a tuple.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from adjcomp.ir.program import Accumulate, AccumulateProduct, AccumulateRows, Accumulator, Compute, Instruction, Program, Slot
from adjcomp.ops.library import NAMESPACE
from adjcomp.runtime.kernels.registry import find
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.rows import add_rows

aten = torch.ops.aten
Compiled = Callable[[list[torch.Tensor], list[torch.Tensor | None], StorageTracker], tuple[Any, ...]]


_COMPILED: dict[tuple[int, str], tuple[Program, Compiled]] = {}  # by identity; the program is held so that its id stays its own
_MOST_COMPILED = 4096


def compiled(program: Program, device: torch.device) -> Compiled:
    """The function of a program, generated once."""
    key = (id(program), device.type)
    known = _COMPILED.get(key)
    if known is not None:
        return known[1]
    if len(_COMPILED) >= _MOST_COMPILED:
        _COMPILED.clear()
    made = compile_program(program, device.type)
    _COMPILED[key] = (program, made)
    return made


# torch's own bindings of frequent ops: the way through an `OpOverload` takes several times as long, and between products, which
# leave nothing of Python in the caches, tens of microseconds.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm_.default: torch.Tensor.addmm_,
    aten.exp.default: torch.exp,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.squeeze.dim: torch.squeeze,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def compile_program(program: Program, device_type: str) -> Compiled:
    """Generate and compile the function of a program, for tensors on a type of device."""
    constants: dict[str, Any] = {}
    lines = ["def run(inputs, gradients, tracker):", "    track = tracker.track", "    track_all = tracker.track_all"]
    if program.inputs:
        lines.append(f"    {', '.join(map(repr, program.inputs))}, = inputs")
    lines.append("    inputs.clear()")
    last = {*program.outputs, *(slot for step in program.instructions for slot in step.frees)}
    unread = [slot for slot in program.inputs if slot in program.owned and slot not in last]
    if unread:
        lines.append(f"    del {', '.join(map(repr, unread))}")
    for step in program.instructions:
        lines.extend(f"    {line}" for line in _lines(step, constants, device_type))
    lines.append(f"    return ({''.join(f'{slot!r}, ' for slot in program.outputs)})")
    namespace: dict[str, Any] = dict(constants)
    exec(compile("\n".join(lines), f"<{program.name}>", "exec"), namespace)
    run: Compiled = namespace["run"]
    return run


def _lines(step: Instruction, constants: dict[str, Any], device_type: str) -> list[str]:
    match step:
        case Compute(target=operator.getitem, args=(whole, place)):
            made = [f"{step.result!r} = {whole!r}[{place!r}]"]
        case Compute():
            args = [_expression(a, constants) for a in step.args] + [
                f"{k}={_expression(v, constants)}" for k, v in step.kwargs.items()
            ]
            made = [f"{step.result!r} = {_constant(_direct(step.target, device_type), constants)}({', '.join(args)})"]
            if step.allocates:
                several = _returns_several(step.target)
                made.append(f"track_all({step.result!r})" if several else f"track({step.result!r})")
        case Accumulate():
            made = [f"gradients[{step.index}]{step.span or ''}.add_({step.value!r})"]
        case AccumulateProduct():
            into = f"gradients[{step.index}]{'.t()' if step.transposed else ''}{step.span or ''}"
            made = [f"{into}.addmm_({step.left!r}, {step.right!r})"]
        case AccumulateRows():
            rows, value = repr(step.rows), repr(step.value)
            made = [f"{_constant(add_rows, constants)}(gradients[{step.index}], {rows}, {value}, {step.padding})"]
    if step.frees:
        made.append(f"del {', '.join(map(repr, step.frees))}")
    return made


def _direct(target: Any, device_type: str) -> Any:
    """The shortest way to run an op. One of ours by its kernel: no derivative is wanted here, and the dispatcher's way to find
    that out takes longer than some kernels.
    """
    if getattr(target, "namespace", "") == NAMESPACE:
        return find(target._schema.name.removeprefix(f"{NAMESPACE}::"), device_type)
    return _BINDINGS.get(target, target)


def _returns_several(target: Any) -> bool:
    return len(target._schema.returns) != 1 or str(target._schema.returns[0].type) == "List[Tensor]"


def _expression(argument: Any, constants: dict[str, Any]) -> str:
    if isinstance(argument, Slot):
        return repr(argument)
    if isinstance(argument, Accumulator):
        return f"gradients[{argument.index}]"
    if isinstance(argument, list):
        return f"[{', '.join(_expression(a, constants) for a in argument)}]"
    if isinstance(argument, tuple):
        return f"({''.join(f'{_expression(a, constants)}, ' for a in argument)})"
    if argument is None or isinstance(argument, bool | int | str):
        return repr(argument)
    return _constant(argument, constants)


def _constant(value: Any, constants: dict[str, Any]) -> str:
    for name, known in constants.items():
        if known is value:
            return name
    name = f"c{len(constants)}"
    constants[name] = value
    return name
