"""Measure adjcomp against plain autograd and others, in one process a workload, into build/bench.json and a table.

    python tests/benchmarks/run.py            # everything (tens of minutes)
    python tests/benchmarks/run.py --quick    # a few minutes

Seconds are medians over pairs (ours, theirs, ours, …), so that a machine whose speed drifts drifts for both. Peaks are the growth
of the process's resident memory in a process of its own. Ratios are competitor / adjcomp: above 1, adjcomp is ahead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from models import Budget, Run, Workload, compiled, plain, plain_same_ops, with_mambapy

COMPETITORS = {"plain-autograd-same-ops": plain_same_ops, "transformers": plain, "transformers+mambapy": with_mambapy}
SAME, LIBRARY, MAMBAPY = COMPETITORS
QUICK = [
    (Workload(256, 4, 8192, Budget.TIGHT), SAME),
    (Workload(256, 4, 8192, Budget.UNLIMITED), SAME),
    (Workload(256, 8, 8192, Budget.TIGHT), SAME),
    (Workload(256, 8, 8192, Budget.UNLIMITED), SAME),
    (Workload(256, 8, 512, Budget.UNLIMITED, one_budget=True), LIBRARY),
    (Workload(256, 8, 2048, Budget.TIGHT, one_budget=True), MAMBAPY),
]
FULL = [
    *QUICK,
    (Workload(256, 4, 32768, Budget.TIGHT), SAME),
    (Workload(256, 4, 65536, Budget.TIGHT), SAME),
    (Workload(128, 8, 65536, Budget.TIGHT), SAME),
]
PAIRS = 5
OUTPUT = Path("build/bench.json")


def main() -> None:
    """Run the workloads and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_ROLES[options.one.split(":")[0]](*_parse(options.one))))
        return
    rows = []
    for workload, competitor in QUICK if options.quick else FULL:
        rows.append(measure(workload, competitor))
        print(_line(rows[-1]), flush=True)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(rows, indent=1))


def measure(workload: Workload, competitor: str) -> dict[str, Any]:
    """One row: both sides' seconds and peaks."""
    times = _child("seconds", workload, competitor)
    ours, theirs = (_child("peak", workload, side) for side in ("adjcomp", competitor))
    return {
        "workload": workload.name,
        "competitor": competitor,
        "exact": times["error"] <= 1e-5,
        "error": times["error"],
        "seconds_ratio": times["ratio"],
        "peak_ratio": theirs["growth"] / ours["growth"],
        "seconds": times["ours"],
        "competitor_seconds": times["theirs"],
        "peak_bytes": ours["growth"],
        "tracked_peak_bytes": ours["tracked"],
        "competitor_peak_bytes": theirs["growth"],
        "budget_bytes": ours["budget"],
    }


def _child(role: str, workload: Workload, side: str) -> dict[str, Any]:
    code = f"{role}:{workload.width}:{workload.layers}:{workload.tokens}:{workload.budget}:{side}"
    result = subprocess.run([sys.executable, __file__, "--one", code], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{code} failed:\n{result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def _parse(code: str) -> tuple[Workload, str]:
    _, width, layers, tokens, budget, side = code.split(":")
    return Workload(int(width), int(layers), int(tokens), Budget(budget)), side


def _step(model: torch.nn.Module, run: Run) -> float:
    started = time.perf_counter()
    run().backward()
    seconds = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return seconds


def _gradients(model: torch.nn.Module, run: Run) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    run().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _seconds(workload: Workload, competitor: str) -> dict[str, float]:
    """Medians over pairs, and the largest relative gradient error between the two."""
    model, ids = workload.model(), workload.tokens_in()
    view = compiled(model, ids, workload.budget)
    ours: Run = lambda: view(input_ids=ids, labels=ids).loss  # noqa: E731
    theirs = COMPETITORS[competitor](model, ids)
    error = _distance(_gradients(model, ours), _gradients(model, theirs))
    pairs = [(_step(model, ours), _step(model, theirs)) for _ in range(PAIRS)]
    return {
        "error": error,
        "ours": statistics.median(a for a, _ in pairs),
        "theirs": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def _distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    scale = 1e-3 * sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    return max(float((got[n] - g).norm()) / (float(g.norm()) + scale) for n, g in expected.items())


def _peak(workload: Workload, side: str) -> dict[str, int]:
    """Growth of resident memory over one step, after a first one has set everything up."""
    model, ids = workload.model(), workload.tokens_in()
    view = compiled(model, ids, workload.budget)
    run = (lambda: view(input_ids=ids, labels=ids).loss) if side == "adjcomp" else COMPETITORS[side](model, ids)
    _step(model, run)
    _settle()
    before = _resident()
    _step(model, run)
    stats = view.stats if side == "adjcomp" else None
    return {
        "growth": _resident() - before,
        "tracked": 0 if stats is None else stats.measured_peak_bytes,
        "budget": 0 if stats is None else stats.budget_bytes,
    }


def _settle() -> None:
    """Hand free memory back and restart the system's record of the peak."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _resident() -> int:
    """The largest resident size since `_settle`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']:34s} vs {row['competitor']:24s} seconds {row['seconds_ratio']:7.2f}x ({row['seconds']:.2f} s)  "
        f"peak {row['peak_ratio']:6.2f}x ({row['peak_bytes'] / 2**20:.0f} MiB)  error {row['error']:.0e}"
    )


_ROLES = {"seconds": _seconds, "peak": _peak}

if __name__ == "__main__":
    main()
