"""Two plans side by side: what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from adjcomp.ir.plan import Plan
from adjcomp.report.text import action_name, tile_modes
from adjcomp.units import format_bytes, format_seconds

SAME = "the plans are the same"


def plan_difference(first: Plan, second: Plan) -> str:
    """A table of what differs between two plans, or `SAME`."""
    if first == second:
        return SAME
    rows = [row for row in (*_figures(first, second), *_memory(first, second), *_counts(first, second)) if row[1] != row[2]]
    if not rows:
        return "the plans differ in the order of their actions or in figures too small to print"
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows)


Row = tuple[str, str, str, str]


def _figures(first: Plan, second: Plan) -> Iterable[Row]:
    """Shape and certificate."""
    for name in ("seq_len", "chunk", "chunk_count", "keeps"):
        yield name.replace("_", " "), str(getattr(first.costs, name)), str(getattr(second.costs, name)), ""
    yield "devices", ", ".join(first.budget_bytes), ", ".join(second.budget_bytes), ""
    for label, a, b in (
        ("budget", max(first.budget_bytes.values()), max(second.budget_bytes.values())),
        ("peak", max(first.peak_bytes.values()), max(second.peak_bytes.values())),
    ):
        yield label, format_bytes(a), format_bytes(b), _change(a, b)
    hosts = [max(plan.host_peak_bytes.values(), default=0) for plan in (first, second)]
    yield "on the host", format_bytes(hosts[0]), format_bytes(hosts[1]), _change(*hosts)
    for label, x, y in (
        ("step", first.seconds, second.seconds),
        ("lower bound", first.lower_bound_seconds, second.lower_bound_seconds),
    ):
        yield label, format_seconds(x), format_seconds(y), _change(x, y)
    yield "gap", f"{100 * first.gap:.2f} %", f"{100 * second.gap:.2f} %", ""
    yield "status", first.status.value, second.status.value, ""


def _memory(first: Plan, second: Plan) -> Iterable[Row]:
    """What is live at the peak."""
    one, two = first.bytes_by_kind, second.bytes_by_kind
    for kind in dict.fromkeys((*one, *two)):
        a, b = one.get(kind, 0), two.get(kind, 0)
        yield f"{kind} at the peak", format_bytes(a), format_bytes(b), _change(a, b)


def _counts(first: Plan, second: Plan) -> Iterable[Row]:
    """How often each action runs, how many tiles have each mode."""
    for what, one, two in (
        ("actions", Counter(map(action_name, first.actions)), Counter(map(action_name, second.actions))),
        ("tiles", _mode_counts(first), _mode_counts(second)),
    ):
        for name in dict.fromkeys((*one, *two)):
            yield f"{what}: {name}", str(one[name]), str(two[name]), ""


def _mode_counts(plan: Plan) -> Counter[str]:
    return Counter(mode for column in tile_modes(plan.costs, plan.actions) for mode in column)


def _change(a: float, b: float) -> str:
    """The second against the first."""
    return f"{100 * (b - a) / a:+.1f} %" if a else ""
