"""Plans for devices that have their layers already: the layers stay, and whatever fits there is found."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import layered_residency, random_stack

from adjcomp.ir.actions import Adjoint, Forward, Loss
from adjcomp.ir.plan import Plan
from adjcomp.machine import GIB, parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine


def layers_on(plan: Plan, device: int) -> set[int]:
    found = {a.layer for a in plan.actions if a.device == device and isinstance(a, Forward | Adjoint)}
    return found | {plan.costs.head for a in plan.actions if a.device == device and isinstance(a, Loss)}


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 7), st.integers(2, 4))
@settings(max_examples=max(1, settings().max_examples // 2), deadline=None)
def test_layers_stay_on_their_devices(seed: int, layers: int, chunks: int, count: int) -> None:
    """Given any cut of the layers, also one that leaves devices without any, then the plan has it."""
    costs, rng = random_stack(seed, layers=layers, chunks=chunks), random.Random(seed)
    cuts = sorted(rng.randint(0, costs.head) for _ in range(count - 1))
    starts, ends = [0, *cuts], [*cuts, costs.head + 1]
    owned = tuple((a, b - 1) if a < b else None for a, b in zip(starts, ends, strict=True))
    plan = solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=parse_machine(f"cpu:{count}"),
        seq_len=costs.seq_len,
        budget_bytes=GIB,
        candidates=[costs.chunk],
        options=Options(placement="layers"),
        owned=owned,
    )
    plan.verify()
    for device, own in enumerate(owned):
        assert layers_on(plan, device) == (set() if own is None else set(range(own[0], own[1] + 1)))
    assert plan.lower_bound_seconds <= plan.seconds
