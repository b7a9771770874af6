"""How near a plan's predictions come on this computer: seconds and peak bytes of a step at five budgets, after calibration.

    python tests/benchmarks/predictions.py            # about a minute on two quiet cores; writes build/predictions.json
    python tests/benchmarks/predictions.py --busy     # on one thread, in seconds of CPU: where others are at work

One model, planned for four multiples of its smallest budget and for as much as it can use. Tiles are timed once for all budgets;
timings that an earlier run left in the cache folder (`calibration`) are used again. A step's seconds are the median of some steps
after the first, both passes together; its peak is that of the storages that are live, parameters and gradients included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from models import Budget, Workload

import adjcomp
from adjcomp.captures import Captures
from adjcomp.compiled import make_view
from adjcomp.errors import BudgetError
from adjcomp.session import Session

SHARES = (None, 4.0, 3.0, 2.0, 1.5)  # of the smallest budget; None: all that the step can use
OUTPUT = Path("build/predictions.json")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3, help="measured steps a budget, after one that is not")
    parser.add_argument("--busy", action="store_true", help="one thread, and seconds of CPU instead of the clock on the wall")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time  # also what calibration and the figures of a step read
    workload = Workload(options.width, options.layers, options.tokens, Budget.UNLIMITED, one_budget=True)
    print(f"{'budget':>12} {'chunk':>6} {'predicted s':>12} {'measured s':>11} {'off':>8} {'peak off by':>12}", flush=True)
    rows = []
    for row in measure(workload, options.steps):
        rows.append(row)
        size, off = row["budget_bytes"] / 2**20, row["predicted_seconds"] / row["seconds"] - 1
        peak = row["measured_peak_bytes"] - row["predicted_peak_bytes"]
        print(
            f"{size:>8.1f} MiB {row['chunk']:>6} {row['predicted_seconds']:>12.3f} {row['seconds']:>11.3f} "
            f"{100 * off:>+7.1f}% {peak:>10} B",
            flush=True,
        )
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(rows, indent=1))


def measure(workload: Workload, steps: int) -> Iterator[dict[str, Any]]:
    """One row a budget."""
    model, ids = workload.model(), workload.tokens_in()
    captures = Captures(model)

    def view_of(budget: int | None) -> Any:
        session = Session(model, budget, None, adjcomp.Options())
        session.captures = captures  # traced once for all budgets
        return make_view(session)

    try:
        view_of(1).plan_for(batch_size=1, seq_len=workload.tokens)
    except BudgetError as error:
        least = error.minimum_bytes
    for share in SHARES:
        view = view_of(None if share is None else int(share * least))
        seconds = []
        for _ in range(steps + 1):
            model.zero_grad(set_to_none=True)
            view(input_ids=ids, labels=ids).loss.backward()
            seconds.append(view.stats.seconds)
        yield {
            "workload": workload.name,
            "budget_bytes": view.stats.budget_bytes if share is not None else view.plan.peak_bytes["cpu"],
            "chunk": view.plan.chunk,
            "predicted_seconds": view.plan.seconds,
            "seconds": statistics.median(seconds[1:]),
            "predicted_peak_bytes": view.stats.predicted_peak_bytes,
            "measured_peak_bytes": view.stats.measured_peak_bytes,
        }


if __name__ == "__main__":
    main()
