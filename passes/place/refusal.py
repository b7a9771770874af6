"""What fits where nothing fits a budget: the least that does, and what fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adjcomp.errors import BudgetError
from adjcomp.ir.plan import Plan
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.ways import Way
from adjcomp.passes.place.writing import Option, modelled, written
from adjcomp.units import format_bytes


def budget_error(problems: Sequence[Problem], ways: Sequence[Way], budget: int) -> BudgetError:
    """The error for a budget that nothing fits: the least that does, by bisection, and what fills it.

    Where nothing fits however large the budget, because of the devices' own memory, it is what would fit on larger devices.
    """
    largest = max(site.memory_bytes for site in problems[0].sites)
    fits_here = _first_fit(problems, ways, largest, capped=True) is not None
    low, high = budget, largest if fits_here else max(2 * budget, 1 << 20)
    while not fits_here and _first_fit(problems, ways, high, capped=False) is None:
        low, high = high, high * 2
        if high > 1 << 60:
            raise ValueError("no budget is large enough for this placement")
    while high - low > max(1, high >> 12):
        middle = (low + high) // 2
        if _first_fit(problems, ways, middle, capped=fits_here) is None:
            low = middle
        else:
            high = middle
    while (plan := _first_written(problems, ways, high, capped=fits_here and high <= largest)) is None:
        high += max(1, high >> 8)
    return BudgetError(budget, high, plan.bytes_by_kind, subject=_culprit(problems, high, largest, fits_here))


def _first_written(problems: Sequence[Problem], ways: Sequence[Way], budget: int, *, capped: bool) -> Plan | None:
    """The plan of the first placement whose model fits; None where it doesn't fit once it is written."""
    option = _first_fit(problems, ways, budget, capped=capped)
    if option is None or budget > 1 << 60:
        raise RuntimeError("a placement that fits by its model never does when it is written")
    return written(option)


def _first_fit(problems: Sequence[Problem], ways: Sequence[Way], budget: int, *, capped: bool) -> Option | None:
    """A placement that fits when every device has `budget` bytes; `capped`: no more than it has memory."""
    for problem in problems:
        sites = tuple(replace(s, budget_bytes=min(budget, s.memory_bytes) if capped else budget) for s in problem.sites)
        for way in ways:
            option = modelled(replace(problem, sites=sites), *way)
            if option is not None:
                return option
    return None


def _culprit(problems: Sequence[Problem], minimum: int, largest: int, fits_here: bool) -> str:
    """The layer that needs most, where it alone is most of the minimum; and whether the devices are too small."""
    problem = problems[0]
    sizes = [sum(sum(kinds.values()) for kinds in problem.residency.on(k, k)) for k in range(problem.head + 1)]
    layer = max(range(len(sizes)), key=sizes.__getitem__)
    what = f"{len(problem.sites)} devices"
    if sizes[layer] >= minimum // 2:
        what = f"layer {problem.costs.layers[layer].name}, which alone holds {format_bytes(sizes[layer])}"
    return what if fits_here else f"{what} (the largest device has {format_bytes(largest)})"
