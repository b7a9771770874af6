"""What the smallest plan of all takes, and what it is made of: the content of a refused budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adjcomp.errors import BudgetError
from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Share
from adjcomp.passes.emit import emit
from adjcomp.passes.layermajor import Segment, emit_layer_major
from adjcomp.passes.schedule.instance import Instance
from adjcomp.passes.schedule.layered import Layering
from adjcomp.passes.simulate import simulate

FEW_COLUMNS = 3  # of the sequence whose peak explains a minimum


def check_layered(layerings: Sequence[Layering], budget: int, least: int, leanest: Instance, device: str) -> None:
    """BudgetError where no layer-major plan fits a budget. `least`: bytes of the smallest other plan, that of `leanest`."""
    found = [(*layering.minimum(), layering.instance.costs) for layering in layerings]
    minimum, segments, costs = min(found, key=lambda row: (row[0], row[2].chunk), default=(least, (), leanest.costs))
    if min(least, minimum) <= budget:
        return
    if least <= minimum:
        raise BudgetError(budget, least, _smallest_peak(leanest, least, device))
    raise BudgetError(budget, minimum, _layered_peak(costs, segments, minimum, device))


def _smallest_peak(instance: Instance, minimum: int, device: str) -> dict[str, int]:
    """Kind -> bytes at the peak of the smallest plan, `minimum` together, without writing that plan.

    With the same lean columns, a sequence of a few chunks has the same peak but for the borders that lie beneath it.
    """
    costs = _few(instance.costs)
    menus = [instance.menus[kind] for kind in replace(instance, costs=costs).kinds()]
    leanest = [menu.options.mode(int(menu.need.argmin()), menu.column) for menu in menus]
    return _scaled(costs, emit(costs, leanest), minimum, device, ("borders", "internals", "workspace"))


def _layered_peak(costs: StackCosts, segments: Sequence[Segment], minimum: int, device: str) -> dict[str, int]:
    """The same of a layer-major plan, in which the residual chunks between segments grow with the sequence."""
    costs = _few(costs)
    return _scaled(costs, emit_layer_major(costs, segments), minimum, device, ("internals", "borders", "workspace"))


def _few(costs: StackCosts) -> StackCosts:
    return replace(costs, chunk_count=min(costs.chunk_count, FEW_COLUMNS))


def _scaled(
    costs: StackCosts, actions: tuple[Action, ...], minimum: int, device: str, growing: tuple[str, ...]
) -> dict[str, int]:
    """The bytes at the peak of a short sequence, as those of a longer one that takes `minimum`: what is missing is of the kinds
    that are `growing`, the first one first.
    """
    share = Share(device, minimum, dict(costs.resident_bytes), dict(costs.turn_bytes))
    found = simulate(costs, (share,), actions).bytes_by_kind[device]
    more = minimum - sum(found.values())
    for kind in growing:
        change = max(more, -found[kind])
        found[kind] += change
        more -= change
    return found
