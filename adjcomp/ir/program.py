"""Programs: a tile function at one chunk length, as straight-line instructions over numbered slots.

Sizes are plain numbers, every slot is released after its last use, and gradients of parameters are added to accumulators as soon
as they exist. So the memory a program needs is known exactly: `workspace_bytes` is its peak over the inputs it does not own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """A numbered value of a program."""

    number: int

    def __repr__(self) -> str:
        return f"v{self.number}"


@dataclass(frozen=True)
class Accumulator:
    """Among the arguments of a `Compute`: the accumulator of a gradient, which the op adds to in place."""

    index: int

    def __repr__(self) -> str:
        return f"gradient[{self.index}]"


@dataclass(frozen=True)
class Compute:
    """`result = target(*args, **kwargs)`, then `frees` are dropped. allocates: the result owns new storage."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Slot
    allocates: bool
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Span:
    """Rows (dimension 0) or columns (dimension 1) start … stop - 1 of a matrix."""

    dim: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Accumulate:
    """`accumulator[index] += value`: the share of one tile in the gradient of an input, or in a span of that."""

    index: int
    value: Slot
    span: Span | None = None
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class AccumulateProduct:
    """`accumulator[index] += left @ right` in place; the product itself is never held.

    transposed: it is added to the accumulator's transpose. span: to a part of that alone.
    """

    index: int
    left: Slot
    right: Slot
    transposed: bool
    span: Span | None = None
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class AccumulateRows:
    """`accumulator[index][rows] += value` in place: the gradient of a table from which rows were looked up, never held whole.

    rows: (…), integers. value: (…, D). The row `padding` takes nothing.
    """

    index: int
    rows: Slot
    value: Slot
    padding: int | None
    frees: tuple[Slot, ...] = ()


Instruction = Compute | Accumulate | AccumulateProduct | AccumulateRows


@dataclass(frozen=True)
class Work:
    """What a program does, for the cost model: flops of matrix products, state updates of recurrences (steps · channels ·
    states),
    bytes read and written by everything, and the number of kernels. past_flops: of attention, for every key before the chunk.
    """

    flops: int = 0
    state_updates: int = 0
    moved_bytes: int = 0
    kernels: int = 0
    past_flops: int = 0


@dataclass(frozen=True)
class TilePrograms:
    """The programs of one template at one chunk length.

    forward: inputs -> outputs. keeping: inputs -> (outputs…, saved…). vjp: (inputs it reads…, outputs it reads…, saved…,
    cotangents…) -> one gradient for each input of kind stream or carry; gradients of parameters and sides go to accumulators,
    numbered as in `gradients`.
    """

    forward: Program
    keeping: Program | None
    vjp: Program | None
    saved_bytes: int
    reads: tuple[int, ...]  # template inputs that the VJP reads
    reads_outputs: tuple[int, ...]  # template outputs that the VJP reads
    cotangents: tuple[int, ...]  # template outputs that take a cotangent
    gradients: tuple[int, ...]  # template inputs whose gradient comes out


@dataclass(frozen=True)
class Program:
    """Straight-line code.

    inputs: slots of the arguments, in order. owned: those whose last reference the program holds (it frees them after their last
        use).
    outputs: slots of the results; None where a result does not exist. workspace_bytes: peak of allocated storage over the
    inputs that are not owned, less the owned inputs' bytes.
    """

    name: str
    inputs: tuple[Slot, ...]
    owned: frozenset[Slot]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Slot | None, ...]
    workspace_bytes: int
    work: Work

    def __str__(self) -> str:
        lines = [f"{self.name}({', '.join(map(repr, self.inputs))}):"]
        for step in self.instructions:
            frees = f"  # frees {', '.join(map(repr, step.frees))}" if step.frees else ""
            lines.append(f"  {_text(step)}{frees}")
        lines.append(f"  return {', '.join(map(repr, self.outputs))}")
        return "\n".join(lines)


def _text(step: Instruction) -> str:
    match step:
        case Compute():
            args = [repr(a) for a in step.args] + [f"{k}={v!r}" for k, v in step.kwargs.items()]
            return f"{step.result!r} = {step.target}({', '.join(args)})"
        case Accumulate():
            return f"gradient[{step.index}]{step.span or ''} += {step.value!r}"
        case AccumulateProduct():
            into = f"gradient[{step.index}]{'.T' if step.transposed else ''}{step.span or ''}"
            return f"{into} += {step.left!r} @ {step.right!r}"
        case AccumulateRows():
            apart = "" if step.padding is None else f", but not at {step.padding}"
            return f"gradient[{step.index}][{step.rows!r}] += {step.value!r}{apart}"
