"""The planner for several devices: chunk length, placement, and what each device keeps.

For each chunk length and placement a model gives the time of the slowest device and a lower bound. The most promising are
written out, merged and timed action by action; the fastest is the plan. The bound is the smallest over all chunk lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adjcomp.errors import BudgetError
from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Certificate, Plan, Share, Status, Wiring
from adjcomp.ir.residency import Residency
from adjcomp.machine import Machine
from adjcomp.options import Options
from adjcomp.passes.cost import FEWEST_RANGES
from adjcomp.passes.place.balance import joined_ranges
from adjcomp.passes.place.grid import Grid, grid, grid_bound, shapes
from adjcomp.passes.place.joined import joined_actions
from adjcomp.passes.place.lines import lanes_of, lines_of
from adjcomp.passes.place.partition import Partition, partition, partition_bound
from adjcomp.passes.place.problem import Problem, Site
from adjcomp.passes.place.ranges import Ranges, ranges
from adjcomp.passes.place.sweep import sweep_actions
from adjcomp.passes.place.timeline import Timeline
from adjcomp.passes.place.wave import station_actions
from adjcomp.passes.schedule.search import LEAST_LIMIT
from adjcomp.passes.simulate import simulate
from adjcomp.units import format_bytes

TRIES = 3  # plans that are written out and timed, for each placement
ENOUGH = 400_000  # actions written out, after which no other plan is tried
MOST_WAITING = 128  # devices whose ranges hand their states on, where they can be joined instead
SHRINKS = 6  # times that a plan over its budget is planned again with less
SPACES = {
    "layers": "contiguous layers on each device, in the machine's order: a wave over the chunks, in which every stage keeps the "
    "internals of its last chunks, and of others its internals or inputs while the wave is under way",
    "time": "contiguous chunks on each device, in the machine's order: every device takes one layer after the other over its "
    "range; every chunk has places of its own for a number of residual chunks, stored after some layers, and makes the others "
    "from those again; no internals are held",
    "joined": "contiguous chunks on each device likewise, at least one, with ranges joined by summaries: every chunk has a place "
    "for internals too, as those of one layer of the whole range are live at once; chunks with places for all their residual "
    "chunks may keep internals of the highest layers from the forward",
    "grid": "stages of contiguous layers in the machine's order, each on several devices next to each other that take its chunks "
    "in turn: the devices of a turn are a wave over their chunks as in a placement by layers, and states go from turn to turn",
}
Solution = Partition | Ranges | Grid
Way = tuple[str, tuple[int, int]]  # a placement, and the stages and lanes of a grid


@dataclass(frozen=True)
class _Option:
    """A placement at one chunk length, before it is written out."""

    problem: Problem
    placement: str
    shape: tuple[int, int]  # stages and lanes of a grid
    solution: Solution
    seconds: float  # expected by the model


def solve_machine(
    forms: Sequence[tuple[Callable[[int], StackCosts], Residency]],
    *,
    machine: Machine,
    seq_len: int,
    budget_bytes: int,
    candidates: Sequence[int],
    options: Options,
    shape: tuple[int, int] | None = None,
    owned: tuple[tuple[int, int] | None, ...] | None = None,
    long_candidates: Sequence[int] = (),
) -> Plan:
    """The fastest plan found for one step on the devices of `machine`.

    Args:
        forms: the ways to keep internals, each with the cost tables at a chunk length for the machine's first device, and what
            lives with each layer on a device.
        machine: the devices in the order of the placement, and their links.
        seq_len: tokens along time.
        budget_bytes: most bytes on each device; a smaller device has its own size.
        candidates: chunk lengths to choose from, tokens.
        options: `placement` says whether devices share the layers, the time, or both in a grid; None tries all. `summaries` says
            whether ranges of time are joined by summaries or hand their states on; None tries both.
        shape: stages and lanes of a grid; None where they are free.
        owned: first and last layer that each device, or each stage of a grid, has already; None where layers are free.
        long_candidates: further chunk lengths, for ranges that are joined by summaries.

    Raises:
        BudgetError: no placement with any of the chunk lengths fits; its `minimum_bytes` does.
        ValueError: ranges have to be joined by summaries, and some layer's states can't be; or time is to be shared, and some
            layer attends to all of it.
    """
    problems = [p for form in forms for p in _problems(*form, machine, seq_len, budget_bytes, candidates)]
    problems = [replace(problem, owned=owned) for problem in problems]
    _check_attention(problems, options)
    ways = _ways(options, shape, len(machine.devices), any(problem.costs.joins for problem in problems))
    if _attends(problems):
        ways = [way for way in ways if way[0] == "layers"]
    tried = [(problem, way) for problem in problems for way in ways]
    if (joined := ("joined", (1, len(machine.devices)))) in ways:
        longer = [length for length in long_candidates if length not in candidates]
        tried += [
            (p, joined) for form in forms for p in (_problems(*form, machine, seq_len, budget_bytes, longer) if longer else ())
        ]
    found, tried = _modelled(tried, len(machine.devices))
    if not found:
        _check_lanes(problems, ways)
        raise _budget_error(problems, ways, budget_bytes)
    placements = tuple(dict.fromkeys(way[0] for _, way in tried))
    best = _best(found, placements, TRIES if _searched(options) else 1)
    if best is None:
        raise _budget_error(problems, ways, budget_bytes)
    bound = min(_bound(problem, *way, found) for problem, way in tried)
    return _certified(best, bound, placements, tuple(sorted({problem.costs.chunk for problem, _ in tried})), options)


def _modelled(tried: Sequence[tuple[Problem, Way]], devices: int) -> tuple[list[_Option], list[tuple[Problem, Way]]]:
    """The options that fit, and what was tried: many ranges don't wait for each other where they can be joined."""

    def solved(pairs: Sequence[tuple[Problem, Way]]) -> list[_Option]:
        return [option for problem, way in pairs if (option := _model(problem, *way)) is not None]

    joined = [pair for pair in tried if pair[1][0] == "joined"]
    found = solved(joined)
    waits = not found or devices <= MOST_WAITING
    others = [pair for pair in tried if pair[1][0] != "joined" and (waits or pair[1][0] != "time")]
    return found + solved(others), joined + others


def _attends(problems: Sequence[Problem]) -> bool:
    """Whether some layer reads the keys and values of all chunks before: those stay on one device."""
    return any(tile.reads_past for tile in problems[0].costs.layers)


def _check_attention(problems: Sequence[Problem], options: Options) -> None:
    """ValueError where devices have to share the time of a model with attention."""
    if _attends(problems) and (options.placement in ("time", "grid") or options.summaries):
        names = [tile.name for tile in problems[0].costs.layers if tile.reads_past]
        asked = f"placement={options.placement!r}" if options.placement in ("time", "grid") else "summaries=True"
        raise ValueError(
            f"{asked} cuts time into ranges, and {names[0]} attends to all tokens before its own: its keys and values stay on "
            "one device. Share layers instead (a mesh dimension 'layers')"
        )


def _check_lanes(problems: Sequence[Problem], ways: Sequence[Way]) -> None:
    """ValueError where a grid has more lanes than there are chunks, whatever the budget."""
    most, lanes = max(p.costs.chunk_count for p in problems), min(lanes for _, (_, lanes) in ways)
    if lanes > most and all(placement == "grid" for placement, _ in ways):
        raise ValueError(f"{problems[0].costs.seq_len} tokens make {most} chunks, which {lanes} ranks along time can't share")


def _best(found: Sequence[_Option], placements: Sequence[str], tries: int) -> Plan | None:
    """The fastest of the plans that are written out: of each placement the most promising options, others where those don't fit.

    None where no plan fits, as models of bytes may be a little too hopeful.
    """
    pool: list[_Option] = []
    for placement in placements:
        own = (option for option in found if option.placement == placement)
        pool += sorted(own, key=lambda option: option.seconds)[:tries]
    best: Plan | None = None
    written = 0
    for option in sorted(pool, key=lambda option: option.seconds):
        if best is None or (option.seconds < best.seconds and written < ENOUGH):
            plan = _written(option)
            written += 0 if plan is None else len(plan.actions)
            best = plan if best is None or (plan is not None and plan.seconds < best.seconds) else best
    others = (option for option in sorted(found, key=lambda option: option.seconds) if option not in pool)
    return best or next((plan for option in others if (plan := _written(option)) is not None), None)


def _ways(options: Options, shape: tuple[int, int] | None, devices: int, joinable: bool) -> list[Way]:
    """The placements to try, with the shape of each: (stages, lanes)."""
    if options.placement == "grid":
        return [("grid", found) for found in (shapes(devices) if shape is None else (shape,))]
    if options.summaries and devices >= FEWEST_RANGES and not joinable:
        raise ValueError("summaries=True, but some layer hands on a state that no summary speaks of")
    able = joinable and devices >= FEWEST_RANGES
    ranges = [("time", not able or not options.summaries), ("joined", able and options.summaries is not False)]
    plain = [("layers", (devices, 1)), *((name, (1, devices)) for name, wanted in ranges if wanted)]
    if options.placement is not None:
        return [way for way in plain if (way[0] == "layers") == (options.placement == "layers")]
    return plain + [("grid", found) for found in shapes(devices) if found[1] > 1]


def relative_speeds(machine: Machine) -> tuple[float, ...]:
    """How many times as fast as the first device each device computes."""
    rates = [device.peak_flops * device.flops_efficiency for device in machine.devices]
    return tuple(rate / rates[0] for rate in rates)


def wiring_of(machine: Machine) -> Wiring:
    """The links of `machine` as a plan has them."""
    nodes = sorted(machine.node_links)
    place = {node: index for index, node in enumerate(nodes)}
    links = tuple((machine.node_links[node].bandwidth, machine.node_links[node].latency) for node in nodes)
    return Wiring(tuple(place[d.node] for d in machine.devices), links, (machine.network.bandwidth, machine.network.latency))


def _problems(
    costs: Callable[[int], StackCosts],
    residency: Residency,
    machine: Machine,
    seq_len: int,
    budget_bytes: int,
    candidates: Sequence[int],
) -> list[Problem]:
    """The problem at each chunk length, shortest first."""
    sites = tuple(
        Site(device.name, min(budget_bytes, device.memory_bytes), device.memory_bytes, speed)
        for device, speed in zip(machine.devices, relative_speeds(machine), strict=True)
    )
    lengths = sorted({min(int(length), seq_len) for length in candidates})
    if not lengths or lengths[0] < 1:
        raise ValueError(f"chunk lengths must be positive and there must be one; got {list(candidates)}")
    return [Problem(replace(costs(length), gradients=()), residency, sites, wiring_of(machine)) for length in lengths]


def _model(problem: Problem, placement: str, shape: tuple[int, int]) -> _Option | None:
    """The best solution of a placement's model; None where nothing fits."""
    solvers: dict[str, Callable[[], Solution | None]] = {
        "layers": lambda: partition(problem),
        "time": lambda: ranges(problem),
        "joined": lambda: joined_ranges(problem),
        "grid": lambda: grid(problem, shape),
    }
    solution = solvers[placement]()
    return None if solution is None else _Option(problem, placement, shape, solution, solution.seconds)


def _bound(problem: Problem, placement: str, shape: tuple[int, int], found: Sequence[_Option]) -> float:
    """Seconds that no plan of a placement at a chunk length goes below."""
    if placement == "layers":
        return partition_bound(problem)
    own = [o.solution for o in found if o.problem is problem and (o.placement, o.shape) == (placement, shape)]
    if not own:
        return math.inf
    return own[0].bound_seconds * (1 - 1e-9) if isinstance(own[0], Ranges) else grid_bound(problem, shape)


def _written(option: _Option) -> Plan | None:
    """The plan of an option, within the budgets: where the model was too hopeful about bytes, with as much less; None where that
    doesn't fit.
    """
    problem, solution = option.problem, option.solution
    for _ in range(SHRINKS):
        plan = _plan(option.problem, solution)
        over = [plan.peak_bytes[share.name] - share.budget_bytes for share in plan.shares]
        if max(over) <= 0:
            return plan
        sites = tuple(replace(s, budget_bytes=s.budget_bytes - max(0, o)) for s, o in zip(problem.sites, over, strict=True))
        problem = replace(problem, sites=sites)
        again = _model(problem, option.placement, option.shape)
        if again is None:
            break
        solution = again.solution
    return None


def _plan(problem: Problem, solution: Solution) -> Plan:
    """A solution as a plan without a bound."""
    owned: list[tuple[int, int] | None] = [None] * len(problem.sites)
    lists: list[tuple[Action, ...]] = [()] * len(problem.sites)
    if not isinstance(solution, Ranges):
        lanes = [lines_of(problem, solution)] if isinstance(solution, Partition) else lanes_of(problem, solution)
        for stations in lanes:
            for index, station in enumerate(stations):
                owned[station.device] = (station.first, station.last)
                lists[station.device] = station_actions(problem.costs, problem.bottom, stations, index)
    else:
        write = joined_actions if solution.joined else sweep_actions
        for device in range(len(problem.sites)):
            lists[device] = write(problem, solution, device)
            owned[device] = (0, problem.head) if lists[device] else None
    busy = [layers for layers in owned if layers is not None]
    everywhere = isinstance(solution, Ranges) or (len(busy) > 1 and set(busy) == {(0, problem.head)})
    shares = []
    for site, layers in zip(problem.sites, owned, strict=True):
        if layers is not None:
            resident, turn = problem.residency.on(*layers)
        else:
            resident, turn = problem.residency.idle(replicated=everywhere), {}
        shares.append(Share(site.name, site.budget_bytes, resident, turn, site.speed))
    actions, seconds = Timeline(problem.costs, problem.wiring, [site.speed for site in problem.sites], lists).run()
    totals = simulate(problem.costs, shares, actions)
    certificate = Certificate(totals.peak_bytes, totals.bytes_by_kind, seconds, 0.0, Status.HEURISTIC, "", (problem.costs.chunk,))
    return Plan(problem.costs, tuple(shares), certificate, actions, problem.wiring)


def _certified(plan: Plan, bound: float, placements: Sequence[str], chunks: tuple[int, ...], options: Options) -> Plan:
    """`plan` with its lower bound and status."""
    searched = _searched(options)
    bound = max(0.0, min(bound, plan.seconds))
    status = (Status.OPTIMAL if bound >= plan.seconds * (1 - 1e-6) else Status.FEASIBLE) if searched else Status.HEURISTIC
    space = "one of the listed chunk lengths; " + "; or ".join(SPACES[placement] for placement in placements)
    certificate = replace(plan.certificate, lower_bound_seconds=bound, status=status, space=space, chunks=chunks)
    return replace(plan, certificate=certificate)


def _searched(options: Options) -> bool:
    """Whether there is time for more than one plan."""
    limit = options.solver_time_limit_seconds
    return limit is None or limit >= LEAST_LIMIT


def _budget_error(problems: Sequence[Problem], ways: Sequence[Way], budget: int) -> BudgetError:
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
    return _written(option)


def _first_fit(problems: Sequence[Problem], ways: Sequence[Way], budget: int, *, capped: bool) -> _Option | None:
    """A placement that fits when every device has `budget` bytes; `capped`: no more than it has memory."""
    for problem in problems:
        sites = tuple(replace(s, budget_bytes=min(budget, s.memory_bytes) if capped else budget) for s in problem.sites)
        for way in ways:
            option = _model(replace(problem, sites=sites), *way)
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
