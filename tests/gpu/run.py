"""One short run on a GPU (at most eight minutes): is every kernel right, how fast is it, and what does a training step take?

    python tests/gpu/run.py                  # writes build/gpu.json and prints a table
    python tests/gpu/run.py --preset tiny    # the same on a small scale; on a CPU too, which tests the script itself

Sections run in order of what is asked first, each row guarded for itself: one that fails becomes a row with an error and the rest
goes on. When the time is up the remaining rows are left out and named. Ends with 1 if a kernel was wrong or a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import correctness  # noqa: E402 - found beside this file and in tests/support
import speed  # noqa: E402
import steps  # noqa: E402
from rows import Job, Row, line  # noqa: E402

OUTPUT = Path("build") / "gpu.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["full", "tiny"], default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=450.0, help="no row starts later than this")
    parser.add_argument("--only", nargs="*", default=[], help="sections: correctness, speed, graphs, steps")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Every row that is to be measured, in order."""
    tiny, device = options.preset == "tiny", torch.device(options.device)
    for section in (correctness.jobs, speed.jobs, speed.graph_jobs, steps.graph_jobs, steps.jobs):
        yield from section(device, tiny)


def run(job: Job) -> Row:
    """One row, or its failure."""
    torch.manual_seed(0)
    try:
        return job.measure()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a row is its result, and the next row runs
        return Row(job.section, job.name, ok=False, note=f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> int:
    options, start = arguments(), time.perf_counter()
    found: list[Row] = []
    print(line("section", "name", "ok", "seconds", "floor", "other", "peak MiB", "note"))
    for job in jobs(options):
        if options.only and job.section not in options.only:
            continue
        if time.perf_counter() - start > options.seconds:
            found.append(Row(job.section, job.name, ok=True, note="left out: no time"))
        else:
            found.append(run(job))
        print(found[-1], flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([row.data() for row in found], indent=1) + "\n")  # whatever happens to the next
    bad = [row for row in found if not row.ok]
    print(f"{len(found)} rows, {len(bad)} not right, {time.perf_counter() - start:.0f} s -> {options.output}")
    return int(bool(bad) or not found)


if __name__ == "__main__":
    sys.exit(main())
