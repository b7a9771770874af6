"""A plan as one HTML page that needs nothing else: figures, memory over time, what runs when, where internals come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan
from adjcomp.ir.verify import describe
from adjcomp.report.page import FRAME, SCRIPT, STYLE
from adjcomp.report.text import MODE_WORDS, action_name, plan_text, tile_modes
from adjcomp.report.timeline import SERIES, Moment, layer_of, timelines
from adjcomp.units import format_bytes, format_seconds

MOST_DEVICES = 16  # that are drawn
BINS = 600  # columns of drawings over time
MOST_COLUMNS = 1024  # of the map of chunks
WIDE, HIGH = 1100, 260  # of the memory drawing
SERIES_COLORS = dict(zip(SERIES, ("#8b95a3", "#2a9d8f", "#3b78c4", "#e09f3e", "#8e63b5", "#d1495b"), strict=True))
ACTION_COLORS = {
    "forward": "#7aa6d6",
    "forward, holding": "#2b5fa3",
    "recompute for internals": "#e0a458",
    "recompute for input": "#f2d398",
    "border recomputed": "#2a9d8f",
    "adjoint and gradients": "#b5485d",
}
MODE_COLORS = {"hold": "#2b5fa3", "redo": "#e0a458", "twice": "#c8553d", "pass": "#b9c0ca", "none": "#dfe3e8"}


def plan_html(plan: Plan) -> str:
    """The page, as text."""
    costs = plan.costs
    parts, lines = [_figures(plan)], timelines(plan)
    end = max(_end(moments) for moments in lines)
    for device in _drawn(lines):
        suffix = "" if len(plan.shares) == 1 else f" on {escape(plan.shares[device].name)}"
        parts += [_memory(plan, device, lines[device], end, suffix), *_runs(costs, device, lines[device], end, suffix)]
    if left := len(lines) - len(_drawn(lines)):
        parts.append(f"<p>{left} other devices have no work or aren't drawn; the printed plan below has all of them.</p>")
    parts += [_modes(plan), _peak(plan), f"<h2>The printed plan</h2>\n<pre>{escape(plan_text(plan))}</pre>"]
    title = f"Plan: {costs.seq_len:,} tokens, {costs.head - 1} layers, {', '.join(escape(share.name) for share in plan.shares)}"
    return FRAME.format(title=title, style=STYLE, script=SCRIPT, body="\n".join(parts))


def _drawn(lines: Sequence[Sequence[Moment]]) -> list[int]:
    """Devices with work; of very many some, evenly spread."""
    busy = [device for device, moments in enumerate(lines) if moments]
    return busy[:: -(-len(busy) // MOST_DEVICES)]


def _end(moments: Sequence[Moment]) -> float:
    """When a device is done."""
    return moments[-1].start + moments[-1].seconds if moments else 0.0


def _figures(plan: Plan) -> str:
    """What one wants to know first."""
    peak, budget = max(plan.peak_bytes.values()), max(plan.budget_bytes.values())
    rows = (
        (format_seconds(plan.seconds), "predicted for a step"),
        (f"{plan.costs.seq_len / plan.seconds:,.0f}" if plan.seconds else "-", "tokens a second, each sequence"),
        (f"{100 * plan.gap:.2f} %", f"gap to the lower bound ({plan.status.value})"),
        (format_bytes(peak), f"peak, of {format_bytes(budget)}"),
        *((format_bytes(size), f"of borders on the host of {escape(name)}") for name, size in plan.host_peak_bytes.items()),
        (f"{plan.costs.chunk_count} × {plan.costs.chunk:,}", "chunks of tokens"),
        (f"{len(plan.actions):,}", "actions"),
    )
    return '<ul class="figures">' + "".join(f"<li><b>{figure}</b><span>{words}</span></li>" for figure, words in rows) + "</ul>"


@dataclass(frozen=True)
class _Clock:
    """Columns of equal length over a stretch of time. Where nothing takes time, there is one column."""

    start: float
    seconds: float
    columns: int

    def span(self, moment: Moment) -> range:
        """The columns that an action touches."""
        if self.seconds <= 0:
            return range(1)
        first = int((moment.start - self.start) / self.seconds * self.columns)
        last = int((moment.start + moment.seconds - self.start) / self.seconds * self.columns - 1e-9)
        return range(min(max(first, 0), self.columns - 1), min(max(first, last, 0), self.columns - 1) + 1)

    def label(self, column: int) -> str:
        """When a column begins."""
        return f"after {format_seconds(self.start + column * self.seconds / self.columns)}"


def _clock(moments: Sequence[Moment], start: float, end: float) -> _Clock:
    """The same stretch of time for all devices."""
    return _Clock(start, end - start, min(BINS, max(1, 4 * len(moments))))


def _highest(moments: Sequence[Moment], clock: _Clock) -> list[Moment]:
    """The fullest action of every column; where a device waits, what is live when it goes on."""
    found: list[Moment | None] = [None] * clock.columns
    for moment in moments:
        for column in clock.span(moment):
            other = found[column]
            if other is None or moment.peak_bytes > other.peak_bytes:
                found[column] = moment
    highest: list[Moment] = []
    later = moments[-1]
    for own in reversed(found):
        later = later if own is None else own
        highest.append(replace(later, sizes=(*later.sizes[:-1], 0)) if own is None else own)
    return highest[::-1]


def _memory(plan: Plan, device: int, moments: Sequence[Moment], end: float, suffix: str) -> str:
    """Bytes live over time, by kind, against the budget."""
    clock = _clock(moments, 0.0, end)
    highest = _highest(moments, clock)
    budget = plan.shares[device].budget_bytes
    peak = max(moment.peak_bytes for moment in moments)
    top = budget if budget <= 2 * peak else round(1.15 * peak)
    tips = [_tip(clock.label(i), moment) for i, moment in enumerate(highest)]
    shown = [name for place, name in enumerate(SERIES) if any(m.sizes[place] for m in highest)]
    return (
        f"<h2>Memory{suffix}</h2>\n<p>Bytes live while the step runs, at the fullest action of every moment. "
        f"The dashed line is the budget{'' if budget <= top else f' ({format_bytes(budget)}, above the drawing)'}.</p>\n"
        f"{_legend({name: SERIES_COLORS[name] for name in shown})}\n"
        f'<div class="drawing" id="memory{device}">{_areas(highest, top, budget)}</div>\n'
        f'<div class="ends"><span>0 s</span><span>{format_seconds(clock.seconds)}</span></div>\n'
        f'<script type="application/json" data-strip="memory{device}">{_json(tips)}</script>'
    )


def _tip(when: str, moment: Moment) -> str:
    kinds = "\n".join(f"{name}: {format_bytes(size)}" for name, size in zip(SERIES, moment.sizes, strict=True) if size)
    return f"{when}: {format_bytes(moment.peak_bytes)}\n{describe(moment.action).split(' frees')[0]}\n{kinds}"


def _areas(columns: Sequence[Moment], top: int, budget: int) -> str:
    """Stacked areas, one a kind, and the budget's line."""
    step = WIDE / len(columns)

    def y(size: float) -> str:
        return f"{HIGH * (1 - size / top):.1f}"

    shapes, below = [], [0] * len(columns)
    for place, name in enumerate(SERIES):
        above = [low + moment.sizes[place] for low, moment in zip(below, columns, strict=True)]
        if above != below:
            edges = [(f"{i * step:.1f}", f"{(i + 1) * step:.1f}") for i in range(len(columns))]
            upper = " ".join(f"{a},{y(size)} {b},{y(size)}" for (a, b), size in zip(edges, above, strict=True))
            lower = " ".join(f"{b},{y(size)} {a},{y(size)}" for (a, b), size in reversed([*zip(edges, below, strict=True)]))
            shapes.append(f'<polygon fill="{SERIES_COLORS[name]}" points="{upper} {lower}"/>')
        below = above
    marks = "".join(
        f'<line class="axis" x1="0" x2="{WIDE}" y1="{y(size)}" y2="{y(size)}"/>'
        f'<text x="4" y="{float(y(size)) - 3:.1f}">{format_bytes(round(size))}</text>'
        for size in (top * share for share in (0.25, 0.5, 0.75))
    )
    line = f'<line class="budget" x1="0" x2="{WIDE}" y1="{y(budget)}" y2="{y(budget)}"/>' if budget <= top else ""
    return f'<svg viewBox="0 -6 {WIDE} {HIGH + 6}" role="img" aria-label="memory over time">{"".join(shapes)}{marks}{line}</svg>'


def _runs(costs: StackCosts, device: int, moments: Sequence[Moment], end: float, suffix: str) -> list[str]:
    """What runs when: the whole step, and a close look at the moment of the peak."""
    whole = _run_grid(costs, f"runs{device}", moments, _clock(moments, 0.0, end))
    highest = max(range(len(moments)), key=lambda i: moments[i].peak_bytes)
    half = 4 * (costs.head + 1)
    near = moments[max(0, highest - half) : highest + half]
    used = dict.fromkeys(action_name(moment.action) for moment in moments)
    found = [
        f"<h2>What runs when{suffix}</h2>\n<p>Time goes to the right, layers go up, from the stem to the head. The forward goes "
        "through the chunks once; the backward comes back through them, runs again what was not held, and walks down.</p>\n"
        f"{_legend({name: ACTION_COLORS[name] for name in used if name in ACTION_COLORS})}\n{whole}"
    ]
    if len(near) < len(moments):
        close = _clock(near, near[0].start, _end(near))
        found.append(f"<p>The same, close to the peak of memory:</p>\n{_run_grid(costs, f'near{device}', near, close)}")
    return found


def _run_grid(costs: StackCosts, name: str, moments: Sequence[Moment], clock: _Clock) -> str:
    """Layers over time; a cell shows what ran the longest in it."""
    letters = dict(zip(ACTION_COLORS, "abcdef", strict=True))
    cells = [["."] * clock.columns for _ in range(costs.head + 1)]
    longest = [[0.0] * clock.columns for _ in range(costs.head + 1)]
    for moment in moments:
        layer, letter = layer_of(costs, moment.action), letters.get(action_name(moment.action))
        if layer is None or letter is None:
            continue
        for column in clock.span(moment):
            if moment.seconds >= longest[layer][column]:
                cells[layer][column], longest[layer][column] = letter, moment.seconds
    words = {letter: word for word, letter in letters.items()}
    colors = {letter: ACTION_COLORS[word] for word, letter in letters.items()}
    ends = (format_seconds(clock.start), format_seconds(clock.start + clock.seconds))
    return _grid(name, cells, _layer_names(costs), [clock.label(i) for i in range(clock.columns)], words, colors, ends)


def _modes(plan: Plan) -> str:
    """The map of chunks and layers by mode."""
    costs = plan.costs
    modes = tile_modes(costs, plan.actions)
    group = -(-len(modes) // MOST_COLUMNS)
    columns = modes[::group]
    letters = dict(zip(MODE_COLORS, "htwpn", strict=True))
    cells = [[letters[column[layer]] for column in columns] for layer in range(costs.head + 1)]
    labels = [f"chunk {i * group}" if group == 1 else f"chunks from {i * group}" for i in range(len(columns))]
    used = dict.fromkeys(mode for column in columns for mode in column)
    return (
        "<h2>Where internals come from</h2>\n<p>Chunks go to the right, layers go up. Each cell is a tile.</p>\n"
        + _legend({f"{mode}: {MODE_WORDS[mode]}": MODE_COLORS[mode] for mode in MODE_COLORS if mode in used})
        + _grid(
            "modes",
            cells,
            _layer_names(costs),
            labels,
            {letter: MODE_WORDS[mode] for mode, letter in letters.items()},
            {letter: MODE_COLORS[mode] for mode, letter in letters.items()},
            ("chunk 0", f"chunk {costs.chunk_count - 1}"),
        )
    )


def _grid(
    name: str,
    cells: Sequence[Sequence[str]],
    names: Sequence[str],
    labels: Sequence[str],
    words: Mapping[str, str],
    colors: Mapping[str, str],
    ends: tuple[str, str],
) -> str:
    """A canvas and its data; the last row of `cells` is drawn on top."""
    rows = ["".join(row) for row in reversed(cells)]
    data = {"rows": rows, "names": list(reversed(names)), "labels": list(labels), "words": dict(words), "colors": dict(colors)}
    return (
        f'<div class="drawing"><canvas id="{name}"></canvas></div>\n'
        f'<div class="ends"><span>{ends[0]}</span><span>{ends[1]}</span></div>\n'
        f'<script type="application/json" data-grid="{name}">{_json(data)}</script>'
    )


def _layer_names(costs: StackCosts) -> list[str]:
    return [tile.name for tile in costs.layers]


def _peak(plan: Plan) -> str:
    """What is live at the peak, as a table."""
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{format_bytes(size)}</td><td>{size:,}</td></tr>"
        for kind, size in plan.bytes_by_kind.items()
        if size
    )
    return f"<h2>At the peak</h2>\n<table><tr><th>kind</th><th>size</th><th>bytes</th></tr>{rows}</table>"


def _legend(colors: Mapping[str, str]) -> str:
    entries = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items())
    return f'<div class="legend">{entries}</div>'


def _json(data: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
