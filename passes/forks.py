"""VJPs of one chunk side by side on several streams of a device, where none waits for another.

Under residual coupling the VJPs of all layers read the same cotangent, the one that the head makes, so those of one chunk may run
in any order (Algorithm 4 of arXiv 2501.00692 counts on it). Side by side they need more memory than one after the other: a chunk
whose VJPs don't fit the budget on several streams keeps to fewer, in the end to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from adjcomp.ir.actions import Action, Adjoint, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.plan import Plan, total
from adjcomp.ir.values import Value
from adjcomp.passes.lanes import Lanes
from adjcomp.passes.lifetimes import dropping
from adjcomp.passes.recipes import Recipes
from adjcomp.passes.simulate import simulate


def side_by_side(plan: Plan, streams: int) -> Plan:
    """`plan`, with the VJPs of a chunk on up to `streams` streams wherever they don't wait for each other and fit the budget.

    The predicted seconds stay: streams share one device, so they fill its gaps but add nothing to what it can do.
    """
    if streams < 2 or len(plan.shares) > 1 or plan.shares[0].host is not None or not plan.costs.shares_cotangent:
        return plan
    actions = tuple(_spread(plan, streams))
    totals = simulate(plan.costs, plan.shares, actions)
    certificate = replace(plan.certificate, peak_bytes=totals.peak_bytes, bytes_by_kind=totals.bytes_by_kind)
    return replace(plan, actions=actions, certificate=certificate)


def _spread(plan: Plan, streams: int) -> Iterator[Action]:
    """The actions of `plan`, runs of VJPs on several streams."""
    recipes, share = Recipes(plan.costs), plan.shares[0]
    room = share.budget_bytes - total(share.resident_bytes)
    for run in _runs(plan.actions):
        if isinstance(run[0], Turn):
            room -= total(share.turn_bytes)
        yield from run if len(run) < 2 else _forked(recipes, run, streams, room)
        room -= sum(_change(recipes, action) for action in run)


def _runs(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """`actions` in pieces: VJPs of layers that follow each other in one chunk together, all others alone."""
    run: list[Action] = []
    for action in actions:
        alike = isinstance(action, Adjoint) and run and isinstance(run[-1], Adjoint) and run[-1].chunk == action.chunk
        if run and not alike:
            yield run
            run = []
        run.append(action)
    if run:
        yield run


def _change(recipes: Recipes, action: Action) -> int:
    """Bytes that an action leaves, less those that it drops."""
    recipe, _ = recipes.of(action)
    return recipe.made_bytes - sum(recipes.size(value) for value in action.frees)


def _forked(recipes: Recipes, run: Sequence[Action], streams: int, room: int) -> Sequence[Action]:
    """The run on as many streams as fit into `room` bytes."""
    for count in range(min(streams, len(run)), 1, -1):
        placed = _placed(recipes, run, count)
        lanes = Lanes(recipes)
        for action in placed:
            lanes.add(action)
        if lanes.extra_bytes <= room:
            return [Fork(), *placed, Join(frees=_shared_frees(run, placed))]
    return run


def _placed(recipes: Recipes, run: Sequence[Action], count: int) -> list[Action]:
    """The run on `count` streams: longest first, each to the least busy. A VJP drops what no other stream reads."""
    groups = _groups(recipes.costs, run)
    seconds = [sum(recipes.of(run[i])[0].seconds for i in group) for group in groups]
    busy, stream_of = [0.0] * count, [0] * len(run)
    for index in sorted(range(len(groups)), key=lambda g: (-seconds[g], groups[g])):
        stream = busy.index(min(busy))
        busy[stream] += seconds[index]
        for i in groups[index]:
            stream_of[i] = stream
    readers = _readers(recipes, run, stream_of)
    placed = []
    for action, stream in zip(run, stream_of, strict=True):
        frees = tuple(value for value in action.frees if len(readers[value]) < 2)
        placed.append(replace(dropping(action, frees), stream=stream))
    return placed


def _groups(costs: StackCosts, run: Sequence[Action]) -> list[list[int]]:
    """Positions in the run, together where their layers add to the same gradients."""
    shared = [set(layers) for layers in chain((tie.layers for tie in costs.ties), costs.shared_sides)]
    found: list[tuple[set[int], list[int]]] = []
    for position, action in enumerate(run):
        assert isinstance(action, Adjoint)
        layers, members = {action.layer}.union(*(group for group in shared if action.layer in group)), [position]
        for other in [entry for entry in found if entry[0] & layers]:
            found.remove(other)
            layers, members = layers | other[0], sorted(members + other[1])
        found.append((layers, members))
    return [members for _, members in found]


def _readers(recipes: Recipes, run: Sequence[Action], stream_of: Sequence[int]) -> dict[Value, set[int]]:
    """The streams that touch each value."""
    found: dict[Value, set[int]] = {}
    for action, stream in zip(run, stream_of, strict=True):
        recipe, chunk = recipes.of(action)
        for kind, layer, offset in (*recipe.reads, *recipe.writes):
            found.setdefault(Value(kind, layer, chunk + offset), set()).add(stream)
    return found


def _shared_frees(run: Sequence[Action], placed: Sequence[Action]) -> tuple[Value, ...]:
    """What the run drops and no stream may drop alone."""
    kept = {value for action in placed for value in action.frees}
    return tuple(value for action in run for value in action.frees if value not in kept)
