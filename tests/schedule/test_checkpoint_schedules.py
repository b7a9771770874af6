"""Nested plans beside the schedules of checkpoint_schedules: for the same chunks and places, never more forward work.

What is compared. A chunk of ours is a step of theirs. Both count every run of a step forward: the first sweep (`Forward`), steps
run again to reach a later one (`Advance`; their `Forward` without data for the adjoint) and the last run before a step is
reversed, which leaves what the adjoint reads (`Recompute` with internals; their `Forward` with `write_adj_deps`). The last step
needs no such second run on either side: the first sweep keeps its internals. Ours is counted from a plan that the verifier has
replayed, in runs of one of its layers: all layers run alike, because internals are small here and every tile may keep them.

A place of theirs holds the state before a step; the state that the forward or the adjoint works on is beside them ("WORK").
Borders of ours are all counted, the one that the chunk at work reads included. So `slots` places are `slots` + 1 borders. Where
they have two kinds of places, ours has as many in all, and, once more, as many of each kind: their disk is our host. Writing and
reading a disk costs nothing there: then they store as often as it helps, and need the least forward work that they can.
"""

from __future__ import annotations

import pytest
from checkpoint_schedules import (  # type: ignore[import-untyped]
    CheckpointSchedule,
    HRevolve,
    MultistageCheckpointSchedule,
    Revolve,
)
from checkpoint_schedules import Forward as Sweep
from checkpoint_schedules import Reverse as Reversal
from synthetic import regular_stack

from adjcomp.ir.actions import Adjoint, Advance, Forward, Recompute
from adjcomp.ir.plan import HostTier, Plan, Share
from adjcomp.passes.nesting import emit_nested
from adjcomp.passes.schedule.away import spilled_instances
from adjcomp.passes.schedule.instance import build_instance
from adjcomp.passes.schedule.needs import least_stored
from adjcomp.passes.schedule.nested import Nesting, least_advances
from adjcomp.passes.schedule.search import build_plan
from adjcomp.passes.schedule.tiers import pairs_of

LAYER = 2  # of the stack below, whose runs are counted
# Few places for many chunks and many for few; the planner nests no deeper than `least_stored` (three advances over a chunk).
PAIRS = [(n, m) for n in (3, 4, 6, 9, 10, 17, 20, 33, 50, 64) for m in (1, 2, 3, 4, 5, 8, 12, 30) if least_stored(n) - 1 <= m]


def our_plan(chunks: int, slots: int) -> Plan:
    """The nested plan of `chunks` chunks whose budget has room for `slots` + 1 borders and all internals of a chunk."""
    costs = regular_stack(16 * chunks, 16, 3, width=1, state=100_000)
    instance = build_instance(costs, Share("cpu", 0, costs.resident_bytes, costs.turn_bytes))
    border = sum(tile.carry_bytes for tile in costs.layers)
    roomy = max(int(instance.lean_menu.need.max()), int(instance.menus[2].need.max()))
    budget = roomy + slots * border
    nesting = Nesting(instance, budget)
    assert nesting.stored == min(slots + 1, chunks)
    nested = nesting.solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs), budget, "cpu")
    plan.verify()
    return plan


def our_plan_in_tiers(chunks: int, places: int, slots: int) -> Plan:
    """The same with room for `slots` + 1 borders on the device and `places` on the host."""
    costs = regular_stack(16 * chunks, 16, 3, width=1, state=100_000)
    border = sum(tile.carry_bytes for tile in costs.layers)
    link = HostTier(places * border, 25e9, 5e-6)
    resident = [build_instance(costs, Share("gpu", 0, costs.resident_bytes, costs.turn_bytes))]
    (pair,) = pairs_of(resident, spilled_instances(resident, "gpu", link))
    menus = [one for i in (pair.resident, pair.host.spilled) for one in (i.lean_menu, i.menus[2])]
    budget = max(int(menu.need.max()) for menu in menus) + slots * border
    nesting = pair.nesting(budget, pair.host.places)
    assert nesting.stored == min(places + slots + 1, chunks)
    nested = nesting.solve()
    assert nested is not None
    plan = build_plan(costs, emit_nested(costs, nested.modes, nested.runs, pair.host.tier), budget, "gpu", link)
    plan.verify()
    return plan


def our_steps(plan: Plan) -> int:
    """Runs of one layer forward."""
    runs = [a for a in plan.actions if isinstance(a, Forward | Advance | Recompute) and a.layer == LAYER]
    assert sum(isinstance(a, Adjoint) and a.layer == LAYER for a in plan.actions) == plan.costs.chunk_count
    return len(runs)


def their_steps(schedule: CheckpointSchedule) -> int:
    """Steps run forward until all are reversed."""
    actions = list(schedule)
    assert sum(len(action) for action in actions if isinstance(action, Reversal)) == schedule.max_n
    return sum(len(action) for action in actions if isinstance(action, Sweep))


@pytest.mark.parametrize(("chunks", "slots"), PAIRS)
def test_nested_plans_never_need_more_forward_work_than_checkpoint_schedules(chunks: int, slots: int) -> None:
    """Given as many chunks and places, when both reverse the sequence, then ours runs no more steps forward than theirs."""
    ours = our_steps(our_plan(chunks, slots))
    theirs = {
        "Revolve": their_steps(Revolve(chunks, slots)),
        "Multistage": their_steps(MultistageCheckpointSchedule(chunks, slots, 0)),
    }
    for disk in {1, slots // 2, slots - 1} - {0, slots}:
        theirs[f"HRevolve, {disk} on disk"] = their_steps(HRevolve(chunks, slots - disk, disk, wd=0, rd=0))
        theirs[f"HRevolve, {disk} on disk at a cost"] = their_steps(HRevolve(chunks, slots - disk, disk))
        theirs[f"Multistage, {disk} on disk"] = their_steps(MultistageCheckpointSchedule(chunks, slots - disk, disk))
    assert {name: steps for name, steps in theirs.items() if ours > steps} == {}


@pytest.mark.parametrize("chunks", [2, 5, 11, 30, 70])
@pytest.mark.parametrize("slots", [1, 2, 3, 6, 15])
def test_the_formula_for_advances_is_their_number_of_steps(chunks: int, slots: int) -> None:
    """Given any depth of nesting, then the first sweep, the advances and the runs before reversals are Revolve's steps."""
    advances = least_advances(chunks, slots + 1)
    assert chunks + advances + (chunks - 1) == their_steps(Revolve(chunks, slots))


TIERS = [(n, disk, ram) for n in (4, 9, 10, 17, 33, 50) for disk, ram in ((1, 1), (2, 1), (1, 3), (4, 2), (8, 4))]


@pytest.mark.parametrize(("chunks", "disk", "ram"), [(n, d, m) for n, d, m in TIERS if least_stored(n) - 1 <= d + m])
def test_plans_in_two_tiers_never_need_more_forward_work_than_hrevolve(chunks: int, disk: int, ram: int) -> None:
    """Given as many chunks, places on the device and on the host, then ours runs no more steps forward than H-Revolve's."""
    ours = our_steps(our_plan_in_tiers(chunks, disk, ram))
    theirs = {
        "HRevolve": their_steps(HRevolve(chunks, ram, disk, wd=0, rd=0)),
        "HRevolve at a cost": their_steps(HRevolve(chunks, ram, disk)),
        "Multistage": their_steps(MultistageCheckpointSchedule(chunks, ram, disk)),
    }
    assert {name: steps for name, steps in theirs.items() if ours > steps} == {}
