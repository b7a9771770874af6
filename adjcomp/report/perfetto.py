"""A plan as a trace in Chrome's JSON format, which Perfetto and chrome://tracing show.

Every device is a process. Each kind of work has a row of its own, so that a glance tells forward, recomputation and adjoint
apart; counters show what is live.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from adjcomp.ir.plan import Plan
from adjcomp.ir.transfers import Receive, Send
from adjcomp.report.text import action_name
from adjcomp.report.timeline import SERIES, Moment, chunk_of, layer_of, timelines

MICRO = 1e6


def plan_trace(plan: Plan) -> str:
    """JSON text of the trace; one event a line. Times are predicted microseconds from the beginning of the step."""
    events = [event for device, moments in enumerate(timelines(plan)) for event in _device_events(plan, device, moments)]
    lines = ",\n".join([json.dumps(event) for event in events])
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _device_events(plan: Plan, device: int, moments: Sequence[Moment]) -> Iterator[dict[str, object]]:
    """All events of a device: names, then one slice and one counter sample an action."""
    yield {"ph": "M", "pid": device, "name": "process_name", "args": {"name": plan.shares[device].name}}
    rows: dict[str, int] = {}
    for moment in moments:
        beside = moment.action.stream > 0 and moment.copied is None
        name = action_name(moment.action) + (f", stream {moment.action.stream}" if beside else "")
        if name not in rows:
            rows[name] = len(rows) + 1
            yield {"ph": "M", "pid": device, "tid": rows[name], "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": device, "tid": rows[name], "name": "thread_sort_index", "args": {"sort_index": rows[name]}}
        if moment.seconds > 0 or moment.copied is not None:
            yield _slice(plan, device, rows[name], moment, name)
        elif isinstance(moment.action, Send | Receive):
            words = f"{name} {moment.action.value}"
            yield {"ph": "i", "pid": device, "tid": rows[name], "ts": _micros(moment.start), "s": "t", "name": words}
        yield {
            "ph": "C",
            "pid": device,
            "name": "bytes live",
            "ts": _micros(moment.start),
            "args": dict(zip(SERIES, moment.sizes, strict=True)),
        }


def _slice(plan: Plan, device: int, row: int, moment: Moment, kind: str) -> dict[str, object]:
    """One action with its beginning and its length; of an action that starts a copy, those of the copy."""
    begin, end = moment.copied or (moment.start, moment.start + moment.seconds)
    layer, chunk = layer_of(plan.costs, moment.action), chunk_of(moment.action)
    name = type(moment.action).__name__ if layer is None else plan.costs.layers[layer].name
    return {
        "ph": "X",
        "pid": device,
        "tid": row,
        "ts": _micros(begin),
        "dur": _micros(end - begin),
        "name": name,
        "cat": kind,
        "args": {"layer": layer, "chunk": chunk, "peak bytes": moment.peak_bytes},
    }


def _micros(seconds: float) -> float:
    """Microseconds with three digits, which is what viewers resolve."""
    return round(seconds * MICRO, 3)
