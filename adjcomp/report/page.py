"""The frame of a plan's page: style, script, and the text around the drawings. Nothing in it is fetched from anywhere."""

from __future__ import annotations

STYLE = """
:root { --paper: #ffffff; --ink: #1d232b; --soft: #667080; --line: #d9dee5; --panel: #f6f7f9; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e6e9ee; --soft: #98a2b0; --line: #333b46; --panel: #1c2229; }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .25rem; }
p { margin: .25rem 0 .6rem; color: var(--soft); max-width: 62rem; }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; padding: 0; list-style: none; }
.figures li { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
.figures b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--soft); font-size: .85rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .85rem; margin: .4rem 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem;
  vertical-align: -.08rem; }
.drawing { overflow-x: auto; } svg, canvas { display: block; width: 100%; height: auto; }
canvas { image-rendering: pixelated; background: var(--panel); border: 1px solid var(--line); box-sizing: border-box; }
svg text { fill: var(--soft); font-size: 11px; } svg .axis { stroke: var(--line); }
svg .budget { stroke: var(--ink); stroke-dasharray: 5 4; }
.ends { display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft); }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid var(--line); }
#note { position: fixed; pointer-events: none; display: none; background: var(--ink); color: var(--paper); padding: .3rem .6rem;
  border-radius: .35rem; font-size: .82rem; white-space: pre; z-index: 2; max-width: 90vw; }
"""

# Grids are strings, one a row, one letter a cell; `words` and `colors` say what the letters mean. Strips have one text a column.
SCRIPT = """
const note = document.getElementById("note");
function tell(event, text) {
  note.textContent = text; note.style.display = text ? "block" : "none";
  const right = event.clientX + 14 + note.offsetWidth > innerWidth;
  note.style.left = (right ? event.clientX - note.offsetWidth - 10 : event.clientX + 14) + "px";
  note.style.top = event.clientY + 14 + "px";
}
function place(event, element, count) {
  const box = element.getBoundingClientRect();
  return Math.max(0, Math.min(count - 1, Math.floor((event.clientX - box.left) / box.width * count)));
}
for (const source of document.querySelectorAll("script[data-grid]")) {
  const grid = JSON.parse(source.textContent), canvas = document.getElementById(source.dataset.grid);
  const rows = grid.rows.length, columns = grid.rows[0].length;
  const wide = Math.max(1, Math.round(1100 / columns)), high = Math.max(3, Math.min(16, Math.round(420 / rows)));
  canvas.width = columns * wide; canvas.height = rows * high;
  const brush = canvas.getContext("2d");
  grid.rows.forEach((row, y) => { for (let x = 0; x < columns; x++) {
    const color = grid.colors[row[x]];
    if (color) { brush.fillStyle = color; brush.fillRect(x * wide, y * high, wide, high > 4 ? high - 1 : high); }
  } });
  canvas.onmousemove = event => {
    const box = canvas.getBoundingClientRect(), x = place(event, canvas, columns);
    const y = Math.max(0, Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows)));
    const word = grid.words[grid.rows[y][x]];
    tell(event, grid.names[y] + ", " + grid.labels[x] + (word ? "\\n" + word : ""));
  };
  canvas.onmouseleave = event => tell(event, "");
}
for (const source of document.querySelectorAll("script[data-strip]")) {
  const strip = JSON.parse(source.textContent), area = document.getElementById(source.dataset.strip);
  area.onmousemove = event => tell(event, strip[place(event, area, strip.length)]);
  area.onmouseleave = event => tell(event, "");
}
"""

FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
<div id="note"></div>
<script>{script}</script>
</body>
</html>
"""
