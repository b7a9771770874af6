"""Reproduce the tables and figures of adjoint sharding (arXiv 2501.00692): measure and plan, then write docs/paper.md.

    python tests/benchmarks/paper/run.py                  # everything (under ten minutes on 2 cores)
    python tests/benchmarks/paper/run.py --only timing    # one part again, then the page from the last results of all
    python tests/benchmarks/paper/run.py --only page      # the page alone

Each part runs in a process of its own on one thread and leaves its results in build/paper: first the one that takes times, alone,
then the others, two at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
ROOT = HERE.parents[2]
RESULTS = ROOT / "build" / "paper"
ALONE = "timing"
PARTS = (ALONE, "figure_1", "training", "measured", "errors", "accounting")  # long ones first


def main() -> None:
    """Run the parts that are asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "page"), help="parts to run again")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        warnings.simplefilter("ignore")
        (RESULTS / f"{options.part}.json").write_text(json.dumps(_result(options.part), indent=1), encoding="utf-8")
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in options.only or PARTS if part != "page"]
    if ALONE in wanted:
        _run(ALONE)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_run, [part for part in wanted if part != ALONE]))
    from page import write_page

    write_page({part: json.loads((RESULTS / f"{part}.json").read_text(encoding="utf-8")) for part in PARTS}, ROOT / "docs")
    print("docs/paper.md is written")


def _run(part: str) -> None:
    """One part in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)


def _result(part: str) -> Any:
    import accounting
    import errors
    import memory
    import timing
    import training

    return {
        "timing": timing.figure_6,
        "errors": errors.approximation_errors,
        "training": training.loss_curves,
        "accounting": accounting.counts,
        "measured": memory.measured,
        "figure_1": memory.figure_1,
    }[part]()


if __name__ == "__main__":
    main()
