"""Plans for machines that need not be here: `plan`, `frontier`, `max_context`."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch

from adjcomp.budget import Held
from adjcomp.captures import Captures
from adjcomp.compiled import example_call
from adjcomp.errors import BudgetError
from adjcomp.ir.plan import Plan
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.machine import Machine, parse_machine
from adjcomp.optimizers import optimizer_bytes, optimizer_bytes_by_name
from adjcomp.options import Options
from adjcomp.passes.calls import CallTensors, describe_call
from adjcomp.passes.chunks import candidate_chunks, long_chunks
from adjcomp.passes.pipeline import Captured
from adjcomp.planning import OfflineRequest, plan_on_machine
from adjcomp.session import made_side_bytes
from adjcomp.units import format_bytes, parse_bytes
from adjcomp.variants import check_streams, make_variant

Example = tuple[Any, ...] | dict[str, Any]
FRONTIER_POINTS = 8
# Captures of models that are alive. They don't refer to their model, which a session does: kept here, it would live for ever.
_CAPTURES: WeakKeyDictionary[torch.nn.Module, OrderedDict[Any, Captured]] = WeakKeyDictionary()


def plan(
    model: torch.nn.Module,
    mem_budget: int | str | None = None,
    *,
    batch_size: int = 1,
    seq_len: int,
    machine: str | Machine = "cpu",
    optimizer: torch.optim.Optimizer | str | None = None,
    chunk: int | None = None,
    example_inputs: Example | None = None,
    adjoint_window: int | None = None,
    coupling: str = "exact",
    options: Options | None = None,
) -> Plan:
    """The plan for a step of `model` on a machine, which need not be here; models on the meta device work.

    Args:
        model: the module; its capture is kept, so that asking again is cheap.
        mem_budget: bytes on every device of the machine; None: all that a device has.
        batch_size, seq_len: sequences, and tokens of each.
        machine: a name such as "a100-80gb", "a100-40gb:8" or "h100-80gb:4x8", the path of a YAML file, or a Machine.
        optimizer: its state is counted; an optimizer or a name such as "adamw".
        chunk: chunk length in tokens; None lets the planner choose.
        example_inputs: arguments of the given shape (tuple or dict) where forward isn't `(input_ids, labels)`.
        adjoint_window, coupling: the gradient, as `adjcomp.compile` takes them.

    Raises:
        BudgetError: nothing fits; its `minimum_bytes` does. CaptureError: the model can't be captured.
        ValueError: an unknown machine or optimizer, a budget above what a device has.
    """
    target = parse_machine(machine)
    budget = _budget(mem_budget, target)
    variant = make_variant(coupling, adjoint_window)
    check_streams(options or Options(), variant)
    return plan_on_machine(
        _request(model, budget, batch_size, seq_len, target, optimizer, chunk, example_inputs, options, variant)
    )


def capture_example(
    model: torch.nn.Module, batch_size: int, seq_len: int, example_inputs: Example | None, variant: Variant = EXACT
) -> tuple[CallTensors, Captured]:
    """A call of the given shape and its capture, kept as long as the model lives."""
    args, kwargs = example_call(model, batch_size, seq_len, example_inputs)
    call = describe_call(args, kwargs)
    captures = Captures(model, variant, by_key=_CAPTURES.setdefault(model, OrderedDict()))
    return call, captures.of((args, kwargs), call)


def _request(
    model: torch.nn.Module,
    budget: int,
    batch_size: int,
    seq_len: int,
    machine: Machine,
    optimizer: torch.optim.Optimizer | str | None,
    chunk: int | None,
    example_inputs: Example | None,
    options: Options | None,
    variant: Variant,
) -> OfflineRequest:
    if seq_len < 1 or batch_size < 1:
        raise ValueError(f"batch_size and seq_len must be at least 1, not {batch_size} and {seq_len}")
    call, captured = capture_example(model, batch_size, seq_len, example_inputs, variant)
    tensors = tuple(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor))
    coming = optimizer_bytes(optimizer, model.parameters())
    return OfflineRequest(
        captured=captured,
        seq_len=call.seq_len,
        held=Held(dict(model.named_parameters()), dict(model.named_buffers()), tensors, coming),
        side_bytes=made_side_bytes(captured, call.seq_len),
        budget_bytes=budget,
        candidates=[min(chunk, call.seq_len)] if chunk is not None else _lengths(call.seq_len, machine),
        machine=machine,
        options=options or Options(),
        optimizer=optimizer_bytes_by_name(optimizer, dict(model.named_parameters())),
        long_candidates=() if chunk is not None else long_chunks(call.seq_len, machine.devices[0].kind, len(machine.devices)),
    )


def _lengths(seq_len: int, machine: Machine) -> list[int]:
    """Chunk lengths worth trying on a machine."""
    return candidate_chunks(seq_len, machine.devices[0].kind, len(machine.devices))


def _budget(mem_budget: int | str | None, machine: Machine) -> int:
    smallest = min(machine.devices, key=lambda device: device.memory_bytes)
    if mem_budget is None:
        return smallest.memory_bytes
    budget = parse_bytes(mem_budget)
    largest = max(device.memory_bytes for device in machine.devices)
    if budget > largest:
        raise ValueError(
            f"mem_budget {format_bytes(budget)} is more than a device of {machine.name} has ({format_bytes(largest)})"
        )
    return budget


def frontier(
    model: torch.nn.Module,
    *,
    seq_len: int,
    machine: str | Machine = "cpu",
    batch_size: int = 1,
    optimizer: torch.optim.Optimizer | str | None = None,
    example_inputs: Example | None = None,
    adjoint_window: int | None = None,
    coupling: str = "exact",
    options: Options | None = None,
    points: int = FRONTIER_POINTS,
) -> list[Plan]:
    """The Pareto curve of memory and time: plans from the smallest budget that works up to the device, none dominated by another.

    Budgets are spaced evenly in their logarithm. `adjoint_window` and `coupling` choose the gradient, as `adjcomp.compile` takes
    them. Raises BudgetError where even the device's whole memory is too little.
    """
    target = parse_machine(machine)
    most = _budget(None, target)

    def planned(budget: int) -> Plan:
        return plan(
            model,
            budget,
            batch_size=batch_size,
            seq_len=seq_len,
            machine=target,
            optimizer=optimizer,
            example_inputs=example_inputs,
            adjoint_window=adjoint_window,
            coupling=coupling,
            options=options,
        )

    try:
        planned(1)
    except BudgetError as error:
        least = error.minimum_bytes
    budgets = [min(most, math.ceil(least * (most / least) ** (i / (points - 1)))) for i in range(points)]
    return _undominated([planned(budget) for budget in dict.fromkeys([least, *budgets[1:]])])


def _undominated(plans: list[Plan]) -> list[Plan]:
    """In order of peak memory, only those faster than every smaller one."""
    kept: list[Plan] = []
    for candidate in sorted(plans, key=lambda p: (max(p.peak_bytes.values()), p.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return kept


def max_context(
    model: torch.nn.Module,
    mem_budget: int | str | None = None,
    *,
    machine: str | Machine = "cpu",
    batch_size: int = 1,
    optimizer: torch.optim.Optimizer | str | None = None,
    adjoint_window: int | None = None,
    coupling: str = "exact",
    options: Options | None = None,
    limit: int = 1 << 30,
) -> int:
    """The longest sequence, in tokens, that a step can train within the budget: a power of two times 1, 1.25, 1.5 or 1.75.

    `adjoint_window` and `coupling` choose the gradient, as `adjcomp.compile` takes them. Returns 0 where not even one token fits,
    and at most `limit`.
    """
    target = parse_machine(machine)
    budget = _budget(mem_budget, target)

    def fits(seq_len: int) -> bool:
        try:
            plan(
                model,
                budget,
                batch_size=batch_size,
                seq_len=seq_len,
                machine=target,
                optimizer=optimizer,
                adjoint_window=adjoint_window,
                coupling=coupling,
                options=Options(solver_time_limit_seconds=0.0) if options is None else options,
            )
        except BudgetError:
            return False
        return True

    ladder = [length for power in range(limit.bit_length()) for length in _steps(power) if length <= limit]
    if not fits(ladder[0]):
        return 0
    low, high = 0, len(ladder)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(ladder[middle]) else (low, middle)
    return ladder[low]


def _steps(power: int) -> list[int]:
    base = 1 << power
    return sorted({base, base + base // 4, base + base // 2, base + base // 2 + base // 4})
