"""Line charts as SVG, with linear or logarithmic axes; no dependency, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b4b94", "#b8860b", "#444444", "#d1495b", "#2a9d8f")
LEFT, TOP, WIDE, HIGH, LEGEND = 78, 34, 400, 250, 250  # the plot's place and size, and the room for the legend


@dataclass(frozen=True)
class Line:
    """One series. dashed: not measured, but planned or arithmetic."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Axis:
    """One axis; `text` says what it is and in what unit."""

    text: str
    log: bool = True


def write_chart(path: Path, title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> None:
    """Draw `lines` into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_chart(title, x, y, lines), encoding="utf-8")


class _Scale:
    """From numbers to places between 0 and `size`."""

    def __init__(self, values: Sequence[float], log: bool, size: float) -> None:
        self.log, self.size = log, size
        low, high = min(values), max(values)
        if log:
            self.low, self.high = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
            self.high = max(self.high, self.low + 1)
        else:
            margin = 0.05 * (high - low) or 1.0
            self.low, self.high = low - margin, high + margin

    def place(self, value: float) -> float:
        number = math.log10(value) if self.log else value
        return self.size * (number - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            step = max(1, round((self.high - self.low) / 6))
            return [10.0**power for power in range(int(self.low), int(self.high) + 1, step)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(f for f in (1, 2, 5, 10) if (self.high - self.low) / (step * f) <= 6)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, math.floor(self.high / step) + 1)]


def _number(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:.3g}"


def _chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    across = _Scale([p[0] for line in lines for p in line.points], x.log, WIDE)
    up = _Scale([p[1] for line in lines for p in line.points], y.log, HIGH)
    width, height = LEFT + WIDE + LEGEND, TOP + HIGH + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in across.ticks():
        place = LEFT + across.place(tick)
        parts.append(f'<line x1="{place:.1f}" y1="{TOP}" x2="{place:.1f}" y2="{TOP + HIGH}" stroke="#ddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{TOP + HIGH + 15}" text-anchor="middle">{_number(tick)}</text>')
    for tick in up.ticks():
        place = TOP + HIGH - up.place(tick)
        parts.append(f'<line x1="{LEFT}" y1="{place:.1f}" x2="{LEFT + WIDE}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts.append(f'<rect x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#444"/>')
    parts.append(f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 36}" text-anchor="middle">{escape(x.text)}</text>')
    middle = TOP + HIGH / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y.text)}</text>')
    for index, line in enumerate(lines):
        parts += _series(index, line, across, up)
    return "\n".join([*parts, "</svg>", ""])


def _series(index: int, line: Line, across: _Scale, up: _Scale) -> list[str]:
    colour = COLOURS[(index if line.colour is None else line.colour) % len(COLOURS)]
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    places = [(LEFT + across.place(a), TOP + HIGH - up.place(b)) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>']
    if len(places) <= 40 and not line.dashed:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in places]
    row = TOP + 10 + 17 * index
    start = LEFT + WIDE + 12
    parts.append(f'<line x1="{start}" y1="{row}" x2="{start + 22}" y2="{row}" stroke="{colour}" stroke-width="2"{dash}/>')
    parts.append(f'<text x="{start + 28}" y="{row + 4}">{escape(line.name)}</text>')
    return parts
