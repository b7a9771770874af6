"""What the instructions of a program read, and where each slot is read last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adjcomp.ir.program import Accumulate, AccumulateProduct, AccumulateRows, Compute, Instruction, Slot


def slots_in(argument: Any) -> list[Slot]:
    """Every slot among the arguments of an instruction."""
    if isinstance(argument, Slot):
        return [argument]
    if isinstance(argument, tuple | list):
        return [slot for item in argument for slot in slots_in(item)]
    if isinstance(argument, dict):
        return slots_in(list(argument.values()))
    return []


def reads_of(step: Instruction) -> list[Slot]:
    """Slots that an instruction reads."""
    match step:
        case Compute():
            return slots_in(step.args) + slots_in(step.kwargs)
        case Accumulate():
            return [step.value]
        case AccumulateProduct():
            return [step.left, step.right]
        case AccumulateRows():
            return [step.rows, step.value]


def with_frees(
    steps: Sequence[Instruction], inputs: tuple[Slot, ...], owned: frozenset[Slot], outputs: tuple[Slot, ...]
) -> tuple[Instruction, ...]:
    """Free every slot after its last use; inputs that the program does not own and outputs stay."""
    kept = (set(inputs) - owned) | set(outputs)
    done: list[Instruction] = []
    for step in reversed(steps):
        touched = dict.fromkeys([*reads_of(step), *([step.result] if isinstance(step, Compute) else [])])
        frees = tuple(slot for slot in touched if slot not in kept)
        kept.update(frees)
        done.append(replace(step, frees=frees))
    return tuple(reversed(done))
