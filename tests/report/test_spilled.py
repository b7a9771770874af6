"""Reports of a plan whose borders wait on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import regular_stack

from adjcomp.ir.plan import HostTier, Plan
from adjcomp.ir.transfers import Fetch, Offload
from adjcomp.options import Options
from adjcomp.passes.schedule import solve
from adjcomp.report.difference import plan_difference


def plan(host: HostTier | None) -> Plan:
    return solve(
        lambda chunk: regular_stack(4096, chunk, 4, width=16, state=40_000),
        seq_len=4096,
        budget_bytes=5_000_000,
        candidates=[128, 256, 512],
        device="gpu",
        options=Options(),
        host=host,
    )


@pytest.fixture(scope="module")
def spilled() -> Plan:
    return plan(HostTier(1 << 30, 1e9, 5e-6))


def test_the_printed_plan_says_what_waits_on_the_host(spilled: Plan) -> None:
    text = str(spilled)
    assert "7 of 8 borders wait on the host" in text
    assert "of 1.000 GiB" in text
    assert "copies to the host and" in text
    assert "or spilled" in text
    assert "on the host" in plan_difference(plan(None), spilled)


def test_the_trace_shows_copies_beside_the_computations(spilled: Plan, tmp_path: Path) -> None:
    spilled.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"offload", "fetch"} <= names
    copies = [event for event in events if event["ph"] == "X" and event["cat"] in ("offload", "fetch")]
    assert len(copies) == sum(isinstance(a, Offload | Fetch) for a in spilled.actions)
    assert all(event["dur"] == pytest.approx(165, abs=0.01) for event in copies)


def test_the_page_shows_the_host(spilled: Plan, tmp_path: Path) -> None:
    spilled.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "of borders on the host of gpu" in page


def test_the_printed_plan_says_that_borders_are_in_two_tiers() -> None:
    border = sum(tile.carry_bytes for tile in regular_stack(4096, 128, 4, width=16, state=40_000).layers)
    text = str(plan(HostTier(3 * border, 25e9, 5e-6)))
    assert "nested in two tiers" in text
    assert "border recomputed" in text
