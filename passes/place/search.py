"""The planner for several devices: chunk length, placement, and what each device keeps.

For each chunk length and placement a model gives the time of the slowest device and a lower bound. The most promising are
written out, merged and timed action by action; the fastest is the plan. The bound is the smallest over all chunk lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Plan, Status, Wiring
from adjcomp.ir.residency import Residency
from adjcomp.machine import Machine
from adjcomp.options import Options
from adjcomp.passes.place.problem import Problem, Site
from adjcomp.passes.place.refusal import budget_error
from adjcomp.passes.place.ways import SPACES, Way, attends, check_attention, check_lanes, ways_of
from adjcomp.passes.place.writing import Option, bound_of, modelled, written
from adjcomp.passes.schedule.search import LEAST_LIMIT

TRIES = 3  # plans that are written out and timed, for each placement
ENOUGH = 400_000  # actions written out, after which no other plan is tried
MOST_WAITING = 128  # devices whose ranges hand their states on, where they can be joined instead


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
    check_attention(problems, options)
    ways = ways_of(options, shape, len(machine.devices), any(problem.costs.joins for problem in problems))
    if attends(problems):
        ways = [way for way in ways if way[0] == "layers"]
    tried = [(problem, way) for problem in problems for way in ways]
    if (joined := ("joined", (1, len(machine.devices)))) in ways:
        longer = [length for length in long_candidates if length not in candidates]
        tried += [
            (p, joined) for form in forms for p in (_problems(*form, machine, seq_len, budget_bytes, longer) if longer else ())
        ]
    found, tried = _solved(tried, len(machine.devices))
    if not found:
        check_lanes(problems, ways)
        raise budget_error(problems, ways, budget_bytes)
    placements = tuple(dict.fromkeys(way[0] for _, way in tried))
    best = _best(found, placements, TRIES if _searched(options) else 1)
    if best is None:
        raise budget_error(problems, ways, budget_bytes)
    bound = min(bound_of(problem, *way, found) for problem, way in tried)
    return _certified(best, bound, placements, tuple(sorted({problem.costs.chunk for problem, _ in tried})), options)


def _solved(tried: Sequence[tuple[Problem, Way]], devices: int) -> tuple[list[Option], list[tuple[Problem, Way]]]:
    """The options that fit, and what was tried: many ranges don't wait for each other where they can be joined."""

    def solved(pairs: Sequence[tuple[Problem, Way]]) -> list[Option]:
        return [option for problem, way in pairs if (option := modelled(problem, *way)) is not None]

    joined = [pair for pair in tried if pair[1][0] == "joined"]
    found = solved(joined)
    waits = not found or devices <= MOST_WAITING
    others = [pair for pair in tried if pair[1][0] != "joined" and (waits or pair[1][0] != "time")]
    return found + solved(others), joined + others


def _best(found: Sequence[Option], placements: Sequence[str], tries: int) -> Plan | None:
    """The fastest of the plans that are written out: of each placement the most promising options, others where those don't fit.

    None where no plan fits, as models of bytes may be a little too hopeful.
    """
    pool: list[Option] = []
    for placement in placements:
        own = (option for option in found if option.placement == placement)
        pool += sorted(own, key=lambda option: option.seconds)[:tries]
    best: Plan | None = None
    actions = 0
    for option in sorted(pool, key=lambda option: option.seconds):
        if best is None or (option.seconds < best.seconds and actions < ENOUGH):
            plan = written(option)
            actions += 0 if plan is None else len(plan.actions)
            best = plan if best is None or (plan is not None and plan.seconds < best.seconds) else best
    others = (option for option in sorted(found, key=lambda option: option.seconds) if option not in pool)
    return best or next((plan for option in others if (plan := written(option)) is not None), None)


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
