"""Plans to draw."""

from __future__ import annotations

from functools import cache

import pytest
from synthetic import layered_residency, regular_stack

from adjcomp.ir.plan import Plan
from adjcomp.machine import parse_machine
from adjcomp.options import Options
from adjcomp.passes.place import solve_machine
from adjcomp.passes.schedule import solve


@cache
def _plan(budget: int) -> Plan:
    return solve(
        lambda chunk: regular_stack(2048, chunk, 4),
        seq_len=2048,
        budget_bytes=budget,
        candidates=[128, 256],
        device="cpu",
        options=Options(),
    )


@pytest.fixture
def tight() -> Plan:
    """Recomputes."""
    return _plan(6_000_000)


@pytest.fixture
def roomy() -> Plan:
    """Holds everything."""
    return _plan(1 << 30)


@pytest.fixture
def spread() -> Plan:
    """On a grid of two stages and two lanes, of a stack with little to share: devices wait."""
    costs = regular_stack(2048, 256, 1)
    return solve_machine(
        [(lambda chunk: costs, layered_residency(costs))],
        machine=parse_machine("cpu:4"),
        seq_len=2048,
        budget_bytes=1 << 30,
        candidates=[256],
        options=Options(placement="grid"),
        shape=(2, 2),
    )
