"""All checks in one command: runs each, whatever became of the one before, and ends with a table of what passed.

`make test` is this script. It exits with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Check:
    """One tool and how it is called."""

    name: str  # what --only takes
    title: str  # what the table says
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    check: Check
    returncode: int
    seconds: float


def all_checks(workers: int, pytest_arguments: list[str]) -> tuple[Check, ...]:
    """The checks in the order they run: those that end soon come first.

    With several workers every process gets one thread, or their thread pools would fight for the same cores.
    """
    pytest = (sys.executable, "-m", "pytest", "-q", *pytest_arguments)
    if workers > 1:
        pytest = (*pytest, "-n", str(workers), "--dist", "worksteal")
    threads = (("OMP_NUM_THREADS", "1"),) if workers > 1 else ()
    return (
        Check("ruff", "ruff: style and likely bugs", (str(BIN / "ruff"), "check", ".")),
        Check("imports", "import-linter: who may import whom", (str(BIN / "lint-imports"), "--no-logo", "--no-cache")),
        Check("mypy", "mypy: strict types", (sys.executable, "-m", "mypy")),
        Check("pytest", "pytest: the default tests", pytest, threads),
    )


def run(check: Check) -> Outcome:
    """Run one check from the root of the repository; its output goes straight to the terminal."""
    print(f"\n── {check.title}", flush=True)
    start = time.perf_counter()
    done = subprocess.run(check.command, cwd=ROOT, env={**os.environ, **dict(check.environment)}, check=False)
    return Outcome(check, done.returncode, time.perf_counter() - start)


def table(outcomes: list[Outcome]) -> str:
    """One line a check, and one for all of them."""
    width = max(len(outcome.check.title) for outcome in outcomes)
    lines = [
        f"{'passed' if outcome.returncode == 0 else 'FAILED'}  {outcome.check.title:<{width}}  {outcome.seconds:6.1f} s"
        for outcome in outcomes
    ]
    failed = sum(outcome.returncode != 0 for outcome in outcomes)
    total = sum(outcome.seconds for outcome in outcomes)
    verdict = f"{failed} of {len(outcomes)} checks failed" if failed else f"all {len(outcomes)} checks passed"
    return "\n".join([*lines, f"{verdict} in {total:.0f} s"])


def main() -> int:
    """Parse the command line, run what it asks for, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=["ruff", "imports", "mypy", "pytest"], help="run these checks alone")
    parser.add_argument("--workers", type=int, default=2, help="pytest processes (1: pytest's own)")
    parser.add_argument("pytest_arguments", nargs="*", help="after --, handed on to pytest")
    arguments = parser.parse_args()
    checks = all_checks(arguments.workers, arguments.pytest_arguments)
    outcomes = [run(check) for check in checks if arguments.only is None or check.name in arguments.only]
    print("\n" + table(outcomes))
    return int(any(outcome.returncode for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
