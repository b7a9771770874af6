"""Measured seconds of a model's tiles, kept in the cache so that equal inputs give equal plans on one machine.

Timings of a busy machine that didn't agree are kept as well, but not trusted: the next process measures them again, and keeps the
smaller of both, as disturbances only add.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adjcomp.passes.cost import Affine, CostModel, TileTimes
from adjcomp.runtime.cache import private_folder, write_atomically
from adjcomp.runtime.calibrate import STEADY_SHARE, Timing, time_tile

log = logging.getLogger("adjcomp")
LENGTHS = (256, 1024)
BEFORE = 2048  # steps to which a tile attends, where it attends to earlier chunks
DIGITS = 3  # of a timing that are kept; more would be noise
PARTS = ("forward", "keeping", "vjp")
METHOD = 2  # changes whenever timings come about in another way: those of another method are not used

Timings = Mapping[int, Mapping[str, Timing]]  # chunk length -> part -> timing

_MEASURED: dict[Path, Timings] = {}  # what this process uses, so that equal shapes keep their plans


def measured_times(model: CostModel, state: Mapping[str, torch.Tensor]) -> tuple[TileTimes, ...]:
    """Times of every template of a cost model: from the cache, else measured now and written to it."""
    lengths = sorted({min(length, model.seq_len) for length in LENGTHS})
    return tuple(_template_times(model, index, lengths, state) for index in range(len(model.stack.templates)))


def _template_times(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor]) -> TileTimes:
    near, longest = _timings(model, index, lengths, state, 0), lengths[-1]
    times = TileTimes(*(_fit(near, part) for part in PARTS))  # type: ignore[arg-type]
    if not model.stack.layers[_first_layer(model, index)].stores:
        return times
    far = _timings(model, index, [longest], state, BEFORE)
    forward, keeping, vjp = (_slope(near[longest], far[longest], part) / (longest * BEFORE) for part in PARTS)
    return replace(times, past=(forward, keeping, vjp))


def _slope(near: Mapping[str, Timing], far: Mapping[str, Timing], part: str) -> float:
    """How much longer a part takes that looks further back."""
    return max(0.0, far[part].seconds - near[part].seconds) if part in far else 0.0


def _timings(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor], before: int) -> Timings:
    """Of a template at some lengths, behind `before` steps to which it attends."""
    path = private_folder("calibration") / f"{_digest(model, index, lengths, state, before)}.json"
    if path not in _MEASURED:
        known = read_timings(path.read_text()) if path.exists() else None
        if known is None or not steady(known):
            measured = _measure(model, index, lengths, state, before)
            known = measured if known is None else agreed(known, measured)
            write_atomically(path, timings_text(known).encode())
        _MEASURED[path] = known
    return _MEASURED[path]


def _first_layer(model: CostModel, index: int) -> int:
    return next(k for k, layer in enumerate(model.stack.layers) if layer.template == index)


def _measure(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor], before: int) -> Timings:
    """Timings of a template's first layer."""
    layer = _first_layer(model, index)
    found = {n: time_tile(model.stack, layer, replace(model, seq_len=n)(n), model.programs(n), state, before) for n in lengths}
    doubt = "" if steady(found) else "; runs disagree, as on a busy machine, and are timed again by the next process"
    log.info("timed tile %s at %s steps%s", model.stack.layers[layer].name, lengths, doubt)
    return found


def steady(timings: Timings) -> bool:
    """Whether all timings can be trusted."""
    return all(timing.steady for row in timings.values() for timing in row.values())


def agreed(known: Timings, measured: Timings) -> Timings:
    """The smaller of two timings of each part; two that nearly agree can be trusted."""
    return {n: {part: _agreed(known[n][part], timing) for part, timing in row.items()} for n, row in measured.items()}


def _agreed(one: Timing, other: Timing) -> Timing:
    low, high = sorted((one, other), key=lambda timing: timing.seconds)
    return Timing(low.seconds, low.steady or high.seconds <= low.seconds * (1 + STEADY_SHARE))


def _fit(rows: Timings, part: str) -> Affine | None:
    """A line through the timings, never negative at any length."""
    points = [(n, row[part].seconds) for n, row in sorted(rows.items()) if part in row]
    if not points:
        return None
    (n, first), (m, last) = points[0], points[-1]
    slope = (last - first) / (m - n) if m > n else 0.0
    slope = min(max(slope, 0.0), last / m)
    return Affine(_rounded(last - slope * m), _rounded(slope))


def _rounded(seconds: float) -> float:
    return float(f"{max(seconds, 0.0):.{DIGITS}g}")


def _digest(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor], before: int) -> str:
    device = next(iter(state.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    key = (
        METHOD,
        model.stack.templates[index].key,
        model.policy.value,
        lengths,
        name,
        torch.__version__,
        *([before] if before else []),
    )
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def timings_text(timings: Timings) -> str:
    """JSON of timings: {length: {part: [seconds, steady]}}."""
    rows = {n: {part: [timing.seconds, timing.steady] for part, timing in row.items()} for n, row in timings.items()}
    return json.dumps(rows)


def read_timings(text: str) -> Timings | None:
    """What `timings_text` wrote; None for a text that is broken or of another version."""
    try:
        data: dict[str, Any] = json.loads(text)
        found = {int(n): {part: Timing(float(s), bool(sure)) for part, (s, sure) in row.items()} for n, row in data.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if found and all("forward" in row and row.keys() <= set(PARTS) for row in found.values()) else None
