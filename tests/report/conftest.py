"""Plans to draw."""

from __future__ import annotations

from functools import cache

import pytest
from synthetic import regular_stack

from adjcomp.ir.plan import Plan
from adjcomp.options import Options
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
