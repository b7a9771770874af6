"""The placements of a machine that are tried: their names, what their plan spaces are, and what is asked in vain."""

from __future__ import annotations

from collections.abc import Sequence

from adjcomp.options import Options
from adjcomp.passes.cost import FEWEST_RANGES
from adjcomp.passes.place.grid import shapes
from adjcomp.passes.place.problem import Problem

SPACES = {
    "layers": "contiguous layers on each device, in the machine's order: a wave over the chunks, in which every stage keeps the "
    "internals of some chunks, and of others its internals or inputs while the wave is under way",
    "time": "contiguous chunks on each device, in the machine's order: every device takes one layer after the other over its "
    "range; every chunk has places of its own for a number of residual chunks, stored after some layers, and makes the others "
    "from those again; no internals are held",
    "joined": "contiguous chunks on each device likewise, at least one, with ranges joined by summaries: every chunk has a place "
    "for internals too, as those of one layer of the whole range are live at once; chunks with places for all their residual "
    "chunks may keep internals of the highest layers from the forward",
    "grid": "stages of contiguous layers in the machine's order, each on several devices next to each other that take its chunks "
    "in turn: the devices of a turn are a wave over their chunks as in a placement by layers, and states go from turn to turn",
}
Way = tuple[str, tuple[int, int]]  # a placement, and the stages and lanes of a grid


def ways_of(options: Options, shape: tuple[int, int] | None, devices: int, joinable: bool) -> list[Way]:
    """The placements to try, with the shape of each: (stages, lanes)."""
    if options.placement == "grid":
        return [("grid", found) for found in (shapes(devices) if shape is None else (shape,))]
    if options.summaries and devices >= FEWEST_RANGES and not joinable:
        raise ValueError("summaries=True, but some layer hands on a state that no summary speaks of")
    able = joinable and devices >= FEWEST_RANGES
    ranges = [("time", not able or not options.summaries), ("joined", able and options.summaries is not False)]
    plain = [("layers", (devices, 1)), *((name, (1, devices)) for name, wanted in ranges if wanted)]
    if options.placement is not None:
        return [way for way in plain if (way[0] == "layers") == (options.placement == "layers")]
    return plain + [("grid", found) for found in shapes(devices) if found[1] > 1]


def attends(problems: Sequence[Problem]) -> bool:
    """Whether some layer reads the keys and values of all chunks before: those stay on one device."""
    return any(tile.reads_past for tile in problems[0].costs.layers)


def check_attention(problems: Sequence[Problem], options: Options) -> None:
    """ValueError where devices have to share the time of a model with attention."""
    if attends(problems) and (options.placement in ("time", "grid") or options.summaries):
        names = [tile.name for tile in problems[0].costs.layers if tile.reads_past]
        asked = f"placement={options.placement!r}" if options.placement in ("time", "grid") else "summaries=True"
        raise ValueError(
            f"{asked} cuts time into ranges, and {names[0]} attends to all tokens before its own: its keys and values stay on "
            "one device. Share layers instead (a mesh dimension 'layers')"
        )


def check_lanes(problems: Sequence[Problem], ways: Sequence[Way]) -> None:
    """ValueError where a grid has more lanes than there are chunks, whatever the budget."""
    most, lanes = max(p.costs.chunk_count for p in problems), min(lanes for _, (_, lanes) in ways)
    if lanes > most and all(placement == "grid" for placement, _ in ways):
        raise ValueError(f"{problems[0].costs.seq_len} tokens make {most} chunks, which {lanes} ranks along time can't share")
