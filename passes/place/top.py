"""The stage with the head. No wave runs ahead in it, so it is a problem for one device, and is solved as one.

Its stack is its own layers above a layer that stands for what comes from below: the wave brings x again at no cost of its own.
"""

from __future__ import annotations

from dataclasses import replace

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import Share
from adjcomp.passes.place.problem import Problem
from adjcomp.passes.place.stage import buffer_bytes
from adjcomp.passes.schedule.bound import lower_bound
from adjcomp.passes.schedule.candidates import flat_minimum
from adjcomp.passes.schedule.greedy import greedy, in_order
from adjcomp.passes.schedule.instance import Instance, build_instance


def top_modes(problem: Problem, device: int, first: int, stored_inputs: int) -> tuple[ColumnMode, ...] | None:
    """Modes of every chunk for layers `first` … head on `device`; None where they don't fit.

    `stored_inputs` chunks keep their x from below, because the wave doesn't reach them.
    """
    instance = top_instance(problem, device, first, stored_inputs)
    budget = problem.sites[device].budget_bytes
    if flat_minimum(instance) > budget:
        return None
    choice = greedy(instance, budget, (lower_bound(instance, budget),))
    shift = first - 1
    made: dict[ColumnMode, ColumnMode] = {}
    for mode in instance.modes(in_order(instance, choice)):
        if mode not in made:
            made[mode] = ColumnMode(mode.held, frozenset(k + shift for k in mode.again))
    return tuple(made[mode] for mode in instance.modes(in_order(instance, choice)))


def top_instance(problem: Problem, device: int, first: int, stored_inputs: int) -> Instance:
    """The scheduling problem of layers `first` … head alone."""
    costs = problem.costs
    resident, turn = problem.residency.on(first, costs.head)
    buffers = buffer_bytes(problem, first, costs.head)
    below = stored_inputs * costs.layers[first - 1].stream_bytes if first > 0 else 0
    share = Share(
        problem.sites[device].name, problem.sites[device].budget_bytes, {**resident, "transfers": buffers + below}, turn
    )
    return build_instance(_own_stack(costs, first) if first > 0 else costs, share, noting=False)


def _own_stack(costs: StackCosts, first: int) -> StackCosts:
    """The layers from `first` on, above one that stands for all below."""
    return replace(
        costs,
        layers=(_incoming(costs.layers[first - 1]), *costs.layers[first:]),
        last_layers=(_incoming(costs.last_layers[first - 1]), *costs.last_layers[first:]),
        publish_bytes=(0, *costs.publish_bytes[first:]),
    )


def _incoming(tile: TileCost) -> TileCost:
    """A layer that brings the x of `tile` and takes its cotangent, for nothing."""
    return replace(
        tile,
        name="below",
        carry_bytes=0,
        keep_bytes=0,
        cotangent_bytes=0,
        adjoint_bytes=0,
        forward_workspace_bytes=tile.stream_bytes,
        keep_workspace_bytes=tile.stream_bytes,
        adjoint_workspace_bytes=0,
        forward_seconds=0.0,
        keep_seconds=0.0,
        adjoint_seconds=0.0,
        reads_input=False,
        reads_output=False,
        reads_carry=False,
        has_vjp=False,
        passes_cotangent=False,
    )
