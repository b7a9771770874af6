"""A plan's trace."""

from __future__ import annotations

import json
from pathlib import Path

from adjcomp.ir.plan import Plan


def test_a_trace_has_a_slice_for_every_action_that_takes_time_and_counts_bytes(tight: Plan, tmp_path: Path) -> None:
    tight.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(action.seconds(tight.costs) > 0 for action in tight.actions)
    assert max(event["ts"] + event["dur"] for event in slices) / 1e6 <= tight.seconds * 1.001
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == len(tight.actions)
    assert max(sum(event["args"].values()) for event in counters) == tight.peak_bytes["cpu"]


def test_rows_are_named_by_the_kind_of_work(tight: Plan, tmp_path: Path) -> None:
    tight.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"forward", "recompute for internals", "adjoint and gradients"} <= names
