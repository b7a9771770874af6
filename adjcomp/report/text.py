"""The printed plan: what is kept where, what that needs, what it takes, and how far from the best it can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, HeadVjp, Loss, Recompute
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.narrow import ROUNDED, Narrow, rounds_borders
from adjcomp.ir.plan import Plan
from adjcomp.ir.summaries import AdjointSettle, AdjointSummarize, Adopt, Detach, Settle, SplitHalo, Summarize, Tail, TailVjp
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.ir.values import value_bytes
from adjcomp.ir.variant import Coupling, Variant
from adjcomp.report.order import order_lines
from adjcomp.report.places import placement_lines
from adjcomp.report.streams import stream_lines
from adjcomp.units import format_bytes, format_seconds

WIDTH = 100
BAR = 24  # characters of a bar
CHUNK_COLUMN = 18  # characters of a list of chunks
MOST_ROWS = 24  # rows of the mode table; the rest is counted

MODE_WORDS = {
    "hold": "internals held from the forward until the backward",
    "redo": "internals recomputed once, from the border, when the backward comes",
    "twice": "input recomputed from the border, internals recomputed just before the adjoint",
    "pass": "run again only to reach the layers above; no gradient here",
    "none": "no gradient here and nothing to run again",
}
GLOSSARY = (
    (
        "border",
        "the state (and convolution tail) a layer hands from one chunk to the next; with it a chunk can be recomputed alone",
    ),
    ("internals", "what a layer's vector-Jacobian product needs of its forward, and residual chunks kept for it"),
    ("adjoint state", "the gradient of a border; it travels backward in time, one per layer"),
    ("workspace", "extra bytes while an action runs, the values it makes included"),
    ("gap", "(seconds - lower bound) / seconds: what the best plan of the stated space could save at most"),
)


@dataclass(frozen=True)
class _Row:
    """Chunks and layers that share a mode."""

    chunks: tuple[int, ...]
    layers: tuple[int, int]  # first and last
    mode: str


def plan_text(plan: Plan) -> str:
    """`plan` as lines of text; equal plans give equal text."""
    places = (placement_lines(plan),) if len(plan.shares) > 1 else ()
    sections = (_summary(plan), *places, _memory(plan), _modes(plan), _actions(plan), _words(plan))
    return "\n\n".join("\n".join(section) for section in sections)


def _summary(plan: Plan) -> list[str]:
    """Shape, time and certificate."""
    costs = plan.costs
    count = f"{costs.chunk_count} chunk{'s' if costs.chunk_count != 1 else ''}"
    return [
        f"Plan: {costs.seq_len} tokens in {count} of {costs.chunk}, {costs.head - 1} layers between stem and head, "
        f"{_places(plan)}",
        f"  step     {format_seconds(plan.seconds)} predicted, at least {format_seconds(plan.lower_bound_seconds)} for any plan",
        f"  gap      {100 * plan.gap:.2f} % ({plan.status.value})",
        *order_lines(plan),
        *_approximation(plan),
        *stream_lines(plan),
    ]


def _approximation(plan: Plan) -> list[str]:
    """A line for plans whose gradient isn't backpropagation's."""
    variant = Variant(Coupling(plan.costs.coupling), plan.costs.adjoint_window)
    why = [str(variant)] if variant.approximate else []
    why += [ROUNDED] if rounds_borders(plan.actions) else []
    return [f"  gradient AN APPROXIMATION of backpropagation; {'; '.join(why)}"] if why else []


def _places(plan: Plan) -> str:
    return f"on {plan.shares[0].name}" if len(plan.shares) == 1 else f"on {len(plan.shares)} devices"


def _memory(plan: Plan) -> list[str]:
    """Peak against budget of every device, and what the peak of the tightest is made of."""
    lines = ["Memory"]
    for share in plan.shares:
        peak = plan.certificate.peak_bytes[share.name]
        lines.append(
            f"  {share.name:<14} {_bar(peak, share.budget_bytes)} {format_bytes(peak)} of {format_bytes(share.budget_bytes)}"
        )
        if share.host is not None:
            size, most = plan.host_peak_bytes[share.name], share.host.budget_bytes
            lines.append(f"  {'its host':<14} {_bar(size, most)} {format_bytes(size)} of {format_bytes(most)}")
    peak = sum(plan.bytes_by_kind.values())
    lines.append("  at the peak" + ("" if len(plan.shares) == 1 else " of the fullest device"))
    for kind, size in plan.bytes_by_kind.items():
        lines.append(f"    {kind:<16} {format_bytes(size):>10}  {_bar(size, peak)}")
    return lines


def _bar(part: int, whole: int) -> str:
    """A bar of `part` in `whole`."""
    full = min(BAR, round(BAR * part / whole)) if whole > 0 else 0
    return f"[{'#' * full}{'.' * (BAR - full)}]"


def _modes(plan: Plan) -> list[str]:
    """Tiers and modes by range of chunks and layers."""
    rows = _rows(plan.costs, tile_modes(plan.costs, plan.actions))
    lines = ["Where internals come from", f"  {'chunks':<{CHUNK_COLUMN}}{'layers':<16}mode"]
    for row in rows[:MOST_ROWS]:
        place = f"{_chunk_ranges(row.chunks):<{CHUNK_COLUMN}}{_layer_range(plan.costs, *row.layers):<16}"
        lines.append(f"  {place}{row.mode:<6} {MODE_WORDS[row.mode]}")
    if len(rows) > MOST_ROWS:
        lines.append(f"  … and {len(rows) - MOST_ROWS} more rows")
    lines.append(f"  tiers: {_tiers(plan)}")
    return lines


def _tiers(plan: Plan) -> str:
    """What is where."""
    spilled = {action.value.chunk for action in plan.actions if isinstance(action, Offload)}
    rounded = {action.chunk for action in plan.actions if isinstance(action, Narrow)}
    if rounded:
        return (
            f"internals, borders and adjoint states are all on the device; {len(rounded)} of {plan.costs.chunk_count} borders "
            "wait in bfloat16 from the forward until the backward comes for them"
        )
    if not spilled:
        return f"internals, borders and adjoint states are all on the device{_nesting(plan)}"
    if again := _recomputed(plan):
        return (
            f"internals and adjoint states are on the device; nested in two tiers: {len(spilled)} of {plan.costs.chunk_count} "
            f"borders wait on the host for a time, {len(again)} are recomputed"
        )
    return (
        f"internals and adjoint states are on the device; {len(spilled)} of {plan.costs.chunk_count} borders wait on the host "
        "from the forward until the backward comes for them"
    )


def _nesting(plan: Plan) -> str:
    """How many borders a nested plan stores in the forward; nothing for a plan that stores them all."""
    again = _recomputed(plan)
    if not again:
        return ""
    stored = plan.costs.chunk_count - len(again)
    return f"; nested: the forward stores {stored} of {plan.costs.chunk_count} borders, the others are recomputed from those"


def _recomputed(plan: Plan) -> set[int]:
    """Chunks whose borders are recomputed."""
    return {action.chunk for action in plan.actions if isinstance(action, Advance)}


def tile_modes(costs: StackCosts, actions: Iterable[Action]) -> list[list[str]]:
    """The mode of every tile, by chunk and layer, read off the actions."""
    held: set[tuple[int, int]] = set()
    runs: dict[tuple[int, int], int] = {}
    for action in actions:
        match action:
            case Forward(layer=layer, chunk=chunk, keep=True):
                held.add((layer, chunk))
            case Loss(chunk=chunk, keep=True):
                held.add((costs.head, chunk))
            case Recompute(layer=layer, chunk=chunk):
                runs[layer, chunk] = runs.get((layer, chunk), 0) + 1
    return [[_mode(costs, k, c, held, runs) for k in range(costs.head + 1)] for c in range(costs.chunk_count)]


def _mode(costs: StackCosts, layer: int, chunk: int, held: set[tuple[int, int]], runs: dict[tuple[int, int], int]) -> str:
    """The mode of one tile."""
    if (layer, chunk) in held:
        return "hold"
    times = runs.get((layer, chunk), 0)
    if not costs.tile(layer, chunk).has_vjp:
        return "pass" if times else "none"
    return "redo" if times < 2 else "twice"


def _rows(costs: StackCosts, modes: Sequence[Sequence[str]]) -> list[_Row]:
    """Sets of equal columns in order of their first chunk, each split into ranges of layers with one mode, top layers first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for chunk, column in enumerate(modes):
        alike.setdefault(tuple(column), []).append(chunk)
    rows = []
    for found, chunks in alike.items():
        high = costs.head
        for layer in range(costs.head, -1, -1):
            if layer == 0 or found[layer - 1] != found[high]:
                rows.append(_Row(tuple(chunks), (layer, high), found[high]))
                high = layer - 1
    return rows


def _chunk_ranges(chunks: Sequence[int]) -> str:
    """Chunks as ranges: `0-6`, `1, 4-5`; with their number where they don't fit the column."""
    ranges: list[list[int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk - 1:
            ranges[-1][1] = chunk
        else:
            ranges.append([chunk, chunk])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    text = ", ".join(parts)
    return text if len(text) < CHUNK_COLUMN else f"{parts[0]}, … ({len(chunks)})"


def _layer_range(costs: StackCosts, first: int, last: int) -> str:
    """Layers by number, with the ends called by their role."""

    def name(layer: int) -> str:
        return "stem" if layer == 0 else "head" if layer == costs.head else str(layer)

    return name(first) if first == last else f"{name(first)} to {name(last)}"


def _actions(plan: Plan) -> list[str]:
    """How often each action runs and what it takes."""
    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for action in plan.actions:
        name = action_name(action)
        counts[name] = counts.get(name, 0) + 1
        seconds[name] = seconds.get(name, 0.0) + action.seconds(plan.costs) / plan.shares[action.device].speed
    lines = [f"{len(plan.actions)} actions"]
    for name, count in counts.items():
        if seconds[name] > 0:
            share = 100 * seconds[name] / (plan.seconds * len(plan.shares))
            lines.append(f"  {name:<26}{count:>8}  {format_seconds(seconds[name]):>14}  {share:5.1f} %")
    return [*lines, *_transfers(plan, counts)]


def _transfers(plan: Plan, counts: Mapping[str, int]) -> list[str]:
    """Copies to a host and back: they run beside the computations, which wait for them now and then."""
    host = plan.shares[0].host
    if host is None:
        return []
    out = sum(value_bytes(plan.costs, action.value) for action in plan.actions if isinstance(action, Offload))
    back = sum(value_bytes(plan.costs, action.value) for action in plan.actions if isinstance(action, Fetch | Load))
    working = sum(action.seconds(plan.costs) for action in plan.actions)
    waiting = max(0.0, plan.seconds - working)
    return [
        f"  {counts['offload']} copies to the host and {counts['fetch'] + counts.get('load', 0)} back, {format_bytes(out)} and "
        f"{format_bytes(back)} at {format_bytes(round(host.bandwidth))}/s, run beside these; computations wait "
        f"{format_seconds(waiting)} for them"
    ]


def action_name(action: Action) -> str:
    """What an action does, in the words of all reports."""
    match action:
        case Forward(keep=True) | Loss(keep=True):
            return "forward, holding"
        case Forward() | Loss():
            return "forward"
        case Recompute(keep=True):
            return "recompute for internals"
        case Recompute():
            return "recompute for input"
        case Advance():
            return "border recomputed"
        case Adjoint() | HeadVjp():
            return "adjoint and gradients"
        case Summarize() | AdjointSummarize():
            return "summary of a range"
        case Settle() | AdjointSettle() | Adopt() | Detach():
            return "border from a summary"
        case Tail():
            return "halos of a range"
        case SplitHalo() | TailVjp():
            return "gradients of halos"
    return type(action).__name__.lower()


def _words(plan: Plan) -> list[str]:
    """What the words mean, and what the bound speaks of."""
    chunks = ", ".join(str(chunk) for chunk in plan.certificate.chunks)
    lines = [f"  {word:<14} {meaning}" for word, meaning in GLOSSARY]
    space = f"{plan.certificate.space}. Chunk lengths: {chunks}."
    return ["Words", *lines, *(f"  {'plan space' if i == 0 else '':<14} {line}" for i, line in enumerate(_wrap(space)))]


def _wrap(text: str) -> list[str]:
    """`text` in lines of at most WIDTH characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return lines
