"""Byte counts: how people write them and how reports print them."""

from __future__ import annotations

import re

_SCALES: dict[str, int] = {
    "B": 1,
    **{unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB", "PB", "EB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"), start=1)},
}
_BY_SPELLING = {unit.lower(): scale for unit, scale in _SCALES.items()}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", re.ASCII)
_ACCEPTED = (
    "an int (bytes), or a number with a unit such as '16GiB', '800MB', '16 GB' or '1.5TiB' (units: " + ", ".join(_SCALES) + ")"
)


def parse_bytes(size: int | str) -> int:
    """Bytes of `size`, rounded down to whole bytes. Units ending in iB are powers of 1024, the others of 1000; case is ignored.

    Raises:
        ValueError: a string of another form, or a size that isn't positive.
        TypeError: neither an int nor a string (a bool or a float would be a guess).
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{size!r} is no byte count; accepted: {_ACCEPTED}")
    if isinstance(size, int):
        if size <= 0:
            raise ValueError(f"a byte count must be positive, not {size}; accepted: {_ACCEPTED}")
        return size
    match = _FORM.fullmatch(size)
    if match is None or match[2].lower() not in _BY_SPELLING:
        raise ValueError(f"{size!r} is no byte count; accepted: {_ACCEPTED}")
    whole, _, fraction = match[1].partition(".")
    scale = _BY_SPELLING[match[2].lower()]
    found: int = int(whole + fraction) * scale // 10 ** len(fraction)
    if found <= 0:
        raise ValueError(f"a byte count must be positive, not {size!r}; accepted: {_ACCEPTED}")
    return found


def format_bytes(size: int) -> str:
    """`size` bytes for people, in powers of 1024 with four digits: '0 B', '512 B', '1.500 KiB', '38.00 GiB'."""
    if abs(size) < 1024:
        return f"{size} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = next((p for p in range(1, len(units)) if abs(size) < 1023.95 * 1024**p), len(units))
    value, unit = size / 1024**power, units[power - 1]
    digits = 3 if abs(value) < 9.9995 else 2 if abs(value) < 99.995 else 1
    return f"{value:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """`seconds` for people: '12.3 us', '4.56 ms', '1.23 s', '3 min 20 s', '2 h 05 min'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
