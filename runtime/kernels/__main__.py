"""`python -m adjcomp.runtime.kernels`: compile every Triton kernel for GPUs that need not be there, and print what they need.

Writes build/kernels.json, a list of rows, and ends with 1 if a kernel does not compile, spills registers, wants more shared
memory than its target has (or than the table of configurations says), or reads memory one number at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adjcomp.runtime.cache import private_folder

if TYPE_CHECKING:
    from adjcomp.runtime.kernels.triton.aot import Row

OUTPUT = Path("build") / "kernels.json"
COLUMNS = ("kernel", "types", "target", "regs", "spills", "shared", "load", "warps")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m adjcomp.runtime.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one target, one number type")
    parser.add_argument("--kernels", default="", help="only kernels whose name contains this")
    parser.add_argument("--targets", nargs="*", help="only these targets")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--update", action="store_true", help="write the shared memory that was measured into table.json")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the rows are written")
    return parser.parse_args()


def line(*cells: object) -> str:
    """A line of the table."""
    widths = (30, 14, 7, -5, -6, -7, -5, -5)
    columns = zip(map(str, cells), widths, strict=False)
    padded = [f"{cell:<{width}}" if width > 0 else f"{cell:>{-width}}" for cell, width in columns]
    return " ".join([*padded, *map(str, cells[len(widths) :])])


def update(rows: list[Row]) -> None:
    """Write the most shared memory that any target needs to each row of the table of configurations."""
    from adjcomp.runtime.kernels.triton import configs

    most: dict[tuple[str, str], int] = {}
    for row in rows:
        place = (row.family, row.config)
        most[place] = max(most.get(place, 0), row.shared_bytes)
    table = [
        replace(
            row, config=replace(row.config, shared_bytes=most.get((row.config.kernel, str(row.config)), row.config.shared_bytes))
        )
        for row in configs.rows()
    ]
    configs.TABLE.write_text(configs.text(table))


def main() -> int:
    """Compile, print, write; 1 if any row has a fault."""
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed here (there is none for this system, or: pip install 'triton>=3.5')", file=sys.stderr)
        return 1
    os.environ.setdefault("TRITON_CACHE_DIR", str(private_folder("triton")))
    from adjcomp.runtime.kernels.triton.catalogue import compiled

    options, start = arguments(), time.perf_counter()
    print(line(*COLUMNS, "configuration"))
    rows, faults = [], 0
    for row in compiled(options.quick, options.kernels, options.targets, options.workers):
        rows.append(row)
        numbers = (row.registers, row.spill_bytes, row.shared_bytes, row.widest_load, f"{row.occupancy:.0%}")
        print(line(row.kernel, row.types, row.target, *numbers, row.config), flush=True)
        for fault in row.faults:
            faults += 1
            print(f"  ^ {row.kernel} on {row.target}: {fault}", file=sys.stderr, flush=True)
    if options.update:
        update(rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    names = {row.kernel for row in rows}
    print(f"{len(rows)} rows, {len(names)} kernels, {faults} faults, {time.perf_counter() - start:.0f} s -> {options.output}")
    return int(faults > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
