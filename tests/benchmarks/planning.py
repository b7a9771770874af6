"""How long plans take to find, how near they come to their bounds, and how much memory that takes: rows of a table in
docs/benchmarks.md.

    python tests/benchmarks/planning.py                   # every instance, each in a process of its own
    python tests/benchmarks/planning.py single hybrid     # some of them

Nothing here needs the machines that are planned for: models are on the meta device. A model is captured before the first of its
plans, whose seconds (wall clock, and of CPU, which other work on this computer disturbs less) don't count that.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from scaling import model_of
from synthetic import eight_unequal_devices, hybrid_stack, layered_residency

import adjcomp
from adjcomp.machine import GIB
from adjcomp.passes.place import solve_machine

MILLION = 1 << 20
HEADER = "| instance | step, s | gap | chunk | actions | to plan, s | of CPU, s | peak RSS |\n|---|---|---|---|---|---|---|---|"


def single() -> None:
    """Mamba-1.4B on one device, from the smallest budget to all of its memory."""
    model = model_of(48)

    def plan(budget: int | str) -> adjcomp.Plan:
        return adjcomp.plan(model, budget, seq_len=MILLION, machine="a100-80gb")

    try:
        plan(1)
    except adjcomp.BudgetError as error:
        least = error.minimum_bytes
    for share in (1.0, 1.05, 1.3):
        show(f"48 layers, 1M tokens, a100-80gb, {share:g} x the minimum", lambda share=share: plan(int(share * least)))
    for budget in ("12GiB", "24GiB", "40GiB", "76GiB"):
        show(f"the same, {budget}", lambda budget=budget: plan(budget))


def placed(devices: str, tokens: int, placements: tuple[str | None, ...], budget: str | None) -> None:
    """Mamba-1.4B on several devices."""
    model = model_of(48)
    options = [(placement, adjcomp.Options(placement=placement)) for placement in placements]
    with contextlib.suppress(adjcomp.BudgetError):  # captures the model
        adjcomp.plan(model, 1, seq_len=tokens, machine=devices)
    for placement, chosen in options:
        show(
            f"48 layers, {tokens // MILLION}M tokens, {devices}, {placement or 'any placement'}",
            lambda chosen=chosen: adjcomp.plan(model, budget, seq_len=tokens, machine=devices, options=chosen),
        )


def eight() -> None:
    """Eight devices of 40 GB."""
    placed("a100-40gb:8", MILLION, ("layers", "time", None), "38GiB")


def cluster() -> None:
    """64 devices in 8 nodes."""
    placed("h100-80gb:8x8", 16 * MILLION, ("layers", "time", "grid", None), None)


def hybrid() -> None:
    """Layers and devices that are all different."""
    costs = hybrid_stack()
    show(
        "64 unequal layers, 1,024 chunks, 8 unequal devices",
        lambda: solve_machine(
            [(lambda _: costs, layered_residency(costs))],
            machine=eight_unequal_devices(),
            seq_len=costs.seq_len,
            budget_bytes=4 * GIB,
            candidates=[costs.chunk],
            options=adjcomp.Options(),
        ),
    )


INSTANCES: dict[str, Callable[[], None]] = {"single": single, "eight": eight, "hybrid": hybrid, "cluster": cluster}


def show(name: str, plan: Callable[[], adjcomp.Plan]) -> None:
    """Plan and print a row."""
    started, cpu = time.perf_counter(), time.process_time()
    try:
        made = plan()
    except adjcomp.BudgetError as error:
        print(f"| {name} | doesn't fit: {error.minimum_bytes / GIB:.1f} GiB ||||||||", flush=True)
        return
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"| {name} | {made.seconds:.4g} | {made.gap:.2%} | {made.chunk:,} | {len(made.actions):,} | {wall:.1f} | {cpu:.1f} "
        f"| {peak / GIB:.1f} GiB |",
        flush=True,
    )


def main() -> None:
    """Print the table, or the rows of one instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="*", metavar="instance", help=f"of {', '.join(INSTANCES)}")
    chosen = parser.parse_args().instances or list(INSTANCES)
    if len(chosen) == 1:
        INSTANCES[chosen[0]]()
        return
    print(HEADER, flush=True)
    for name in chosen:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
