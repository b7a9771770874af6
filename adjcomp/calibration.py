"""Measured seconds of a model's tiles, kept in the cache so that equal inputs give equal plans on one machine."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from adjcomp.ir.stack import Layer, ResidualStack
from adjcomp.passes.cost import Affine, CostModel, TileTimes
from adjcomp.runtime.cache import private_folder, write_atomically
from adjcomp.runtime.calibrate import time_tile

log = logging.getLogger("adjcomp")
LENGTHS = (256, 1024)
DIGITS = 3  # of a timing that are kept; more would be noise


def measured_times(model: CostModel, state: Mapping[str, torch.Tensor]) -> tuple[TileTimes, ...]:
    """Times of every template of a cost model: from the cache, else measured now and written to it."""
    lengths = sorted({min(length, model.seq_len) for length in LENGTHS})
    return tuple(_template_times(model, index, lengths, state) for index in range(len(model.stack.templates)))


def _template_times(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor]) -> TileTimes:
    path = private_folder("calibration") / f"{_digest(model, index, lengths, state)}.json"
    if path.exists():
        known = _read(path.read_text())
        if known is not None:
            return known
    layer = _layer(model.stack, index)
    rows = {n: time_tile(model.stack.templates[index], layer, model.programs(n)[index], n, state) for n in lengths}
    times = TileTimes(*(_fit(rows, part) for part in ("forward", "keeping", "vjp")))  # type: ignore[arg-type]
    write_atomically(path, _text(times).encode())
    log.info("timed tile %s at %s steps", layer.name, lengths)
    return times


def _layer(stack: ResidualStack, template: int) -> Layer:
    return next(layer for layer in stack.layers if layer.template == template)


def _fit(rows: Mapping[int, Mapping[str, float]], part: str) -> Affine | None:
    """A line through the timings, never negative at any length."""
    points = [(n, row[part]) for n, row in sorted(rows.items()) if part in row]
    if not points:
        return None
    (n, first), (m, last) = points[0], points[-1]
    slope = (last - first) / (m - n) if m > n else 0.0
    slope = min(max(slope, 0.0), last / m)
    return Affine(_rounded(last - slope * m), _rounded(slope))


def _rounded(seconds: float) -> float:
    return float(f"{max(seconds, 0.0):.{DIGITS}g}")


def _digest(model: CostModel, index: int, lengths: list[int], state: Mapping[str, torch.Tensor]) -> str:
    device = next(iter(state.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    key = (model.stack.templates[index].key, model.policy.value, lengths, name, torch.__version__)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _text(times: TileTimes) -> str:
    parts = {"forward": times.forward, "keeping": times.keeping, "vjp": times.vjp}
    return json.dumps({name: None if part is None else [part.constant, part.slope] for name, part in parts.items()})


def _read(text: str) -> TileTimes | None:
    """What `_text` wrote; None for a file that is broken or of another version."""
    try:
        data: dict[str, Any] = json.loads(text)
        return TileTimes(*(None if data[part] is None else Affine(*data[part]) for part in ("forward", "keeping", "vjp")))  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError):
        return None
