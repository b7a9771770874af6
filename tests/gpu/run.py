"""One short run on a GPU (at most eight minutes): is every kernel right, how fast is it, and what does a training step take?

    python tests/gpu/run.py                  # writes build/gpu.json and prints a table
    python tests/gpu/run.py --preset tiny    # the same on a small scale; on a CPU too, which tests the script itself

First, in several processes at once, what needs no quiet: is every kernel right, and the first call of all that is timed later, so
that it finds its kernels compiled. Then one row after the other: speed, CUDA graphs, training steps. A row that fails, breaks the
device or takes too long becomes a row with an error, and the rest goes on in a new process. When the time is up the remaining
rows are left out and named. Ends with 1 if a kernel was wrong or a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent)]

from rows import Row, line  # noqa: E402 - found beside this file
from workers import Clock, Worker, jobs, one_by_one, side_by_side  # noqa: E402

OUTPUT = Path("build") / "gpu.json"
TOGETHER = ("correctness", "first calls")  # sections in which nothing is timed
LONGEST = 150.0  # seconds for one of their rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["full", "tiny"], default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=450.0, help="no row runs longer than until then")
    parser.add_argument("--only", nargs="*", default=[], help="sections: correctness, first calls, speed, graphs, steps")
    parser.add_argument("--workers", type=int, help="processes at once (default: one for each core up to 12; on a CPU 1)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def rows(options: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """Every row that is wanted, as it is found."""
    tiny, device = options.preset == "tiny", torch.device(options.device)
    wanted = [(i, job) for i, job in enumerate(jobs(device, tiny)) if not options.only or job.section in options.only]
    together = [(i, job) for i, job in wanted if job.section in TOGETHER]
    make = partial(Worker, device, tiny)
    count = options.workers or (1 if device.type == "cpu" else min(12, os.cpu_count() or 1))
    yield from side_by_side(together, make, count, clock, LONGEST)
    yield from one_by_one([item for item in wanted if item not in together], make, clock)


def main() -> int:
    options = arguments()
    clock, found = Clock(options.seconds), []
    print(line("section", "name", "ok", "seconds", "floor", "other", "peak MiB", "note"))
    for row in rows(options, clock):
        found.append(row)
        print(row, flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([row.data() for row in found], indent=1) + "\n")  # whatever happens to the next
    bad = [row for row in found if not row.ok]
    print(f"{len(found)} rows, {len(bad)} not right, {options.seconds - clock.left:.0f} s -> {options.output}")
    return int(bool(bad) or not found)


if __name__ == "__main__":
    sys.exit(main())
