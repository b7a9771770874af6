"""The planner for one device: chunk length and tile modes together.

For each chunk length the relaxation gives a lower bound and a price, and the price a constructive plan. Chunk lengths whose
bound is above the best plan are out. The exact search then runs where something is left to gain, shortest bound first. What it
leaves open is the certificate's gap: the smallest bound over all chunk lengths against the plan.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from adjcomp.errors import BudgetError
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.plan import Certificate, Plan, Share, Status
from adjcomp.options import Options
from adjcomp.passes.emit import emit
from adjcomp.passes.schedule.bound import Bound, lower_bound
from adjcomp.passes.schedule.greedy import Choice, greedy, in_order, lean_choice, least_need
from adjcomp.passes.schedule.instance import Instance, build_instance
from adjcomp.passes.simulate import simulate

DEFAULT_LIMIT = 1.0  # deterministic seconds of search for a plan
LEAST_LIMIT = 1e-3  # below this no search is started
ROUNDING = 1e-9  # relative room for the rounding of times to ticks in a bound
OPTIMAL_GAP = 1e-6  # relative gap that counts as none
SMALL_GAP = 5e-4  # gap at which the search of long sequences stops
FEW_CHUNKS = 24  # up to which the search goes on until nothing is left
SPACE = (
    "one device, time-major; one of the listed chunk lengths; each chunk holds the internals of its top tiles from the forward "
    "and recomputes the others from the border in one pass, in which each tile keeps its internals or its input"
)


@dataclass
class _Candidate:
    """One chunk length: its instance, the best choice so far and the best bound so far (ticks of its own instance)."""

    instance: Instance
    choice: Choice
    bound: Bound

    @property
    def seconds(self) -> float:
        return self.choice.ticks * self.instance.tick

    @property
    def bound_seconds(self) -> float:
        return self.bound.ticks * self.instance.tick * (1 - ROUNDING)


def solve(
    costs: Callable[[int], StackCosts],
    *,
    seq_len: int,
    budget_bytes: int,
    candidates: Sequence[int],
    device: str,
    options: Options,
) -> Plan:
    """The fastest plan found for one step on one device.

    Args:
        costs: the cost tables at a chunk length; called once for each candidate.
        seq_len: tokens along time.
        budget_bytes: most bytes live at any action.
        candidates: chunk lengths to choose from, tokens; longer ones than `seq_len` count as `seq_len`.
        device: the device's name in the plan.
        options: `solver_time_limit_seconds` is used here.

    Raises:
        BudgetError: no plan with any of the chunk lengths fits; its `minimum_bytes` does.
        ValueError: no candidates, an empty sequence, or nothing that takes a gradient.
    """
    instances = _instances(costs, seq_len, candidates, device, budget_bytes)
    minima = {chunk: minimum_bytes(instance) for chunk, instance in instances.items()}
    if min(minima.values()) > budget_bytes:
        raise _budget_error(instances, minima, budget_bytes, device)
    fitting = [_candidate(instance, budget_bytes) for chunk, instance in instances.items() if minima[chunk] <= budget_bytes]
    limit = DEFAULT_LIMIT if options.solver_time_limit_seconds is None else options.solver_time_limit_seconds
    if limit >= LEAST_LIMIT and not _has_solver():
        warnings.warn(
            "OR-Tools is not installed: this plan is a constructive one (pip install ortools)", RuntimeWarning, stacklevel=2
        )
        limit = 0.0
    if limit >= LEAST_LIMIT:
        _sharpen(fitting, budget_bytes)
        _refine(fitting, budget_bytes, limit)
    best = min(fitting, key=lambda c: (c.seconds, c.instance.costs.chunk))
    bound = min(candidate.bound_seconds for candidate in fitting)
    plan = build_plan(best.instance.costs, best.instance.modes(in_order(best.instance, best.choice)), budget_bytes, device)
    return _certified(plan, bound, tuple(sorted(instances)), searched=limit >= LEAST_LIMIT)


def _has_solver() -> bool:
    """Whether OR-Tools can be imported."""
    return importlib.util.find_spec("ortools") is not None


def minimum_bytes(instance: Instance) -> int:
    """The smallest budget that any choice of the instance fits."""
    return max(int(least_need(instance)[0]), instance.fixed_bytes)


def build_plan(costs: StackCosts, modes: Sequence[ColumnMode], budget_bytes: int, device: str) -> Plan:
    """The plan of `modes`, with exact peak and seconds, and no bound yet."""
    share = Share(device, budget_bytes, dict(costs.resident_bytes), dict(costs.turn_bytes))
    actions = emit(costs, modes)
    totals = simulate(costs, (share,), actions)
    certificate = Certificate(
        totals.peak_bytes, totals.bytes_by_kind, totals.seconds, 0.0, Status.HEURISTIC, SPACE, (costs.chunk,)
    )
    return Plan(costs, (share,), certificate, actions)


def _instances(
    costs: Callable[[int], StackCosts], seq_len: int, candidates: Sequence[int], device: str, budget_bytes: int
) -> dict[int, Instance]:
    """Chunk length -> instance, shortest first."""
    if seq_len < 1:
        raise ValueError(f"a sequence has at least one token, not {seq_len}")
    lengths = sorted({min(int(length), seq_len) for length in candidates})
    if not lengths or lengths[0] < 1:
        raise ValueError(f"chunk lengths must be positive and there must be one; got {list(candidates)}")
    found = {}
    for length in lengths:
        table = costs(length)
        found[length] = build_instance(table, Share(device, budget_bytes, table.resident_bytes, table.turn_bytes))
    return found


def _candidate(instance: Instance, budget: int) -> _Candidate:
    """Bound and constructive plan of one chunk length that fits."""
    bound = lower_bound(instance, budget)
    if bound is None:
        raise RuntimeError(f"the relaxation at chunk length {instance.costs.chunk} refutes a budget that a plan fits")
    return _Candidate(instance, greedy(instance, budget, (bound,)), bound)


def _worth_a_look(fitting: list[_Candidate], gap: float) -> Iterator[_Candidate]:
    """Candidates that may beat the best plan by more than `gap`, best bound first; the plans may improve on the way."""
    for candidate in sorted(fitting, key=lambda c: (c.bound_seconds, c.instance.costs.chunk)):
        if candidate.bound_seconds < min(c.seconds for c in fitting) * (1 - gap):
            yield candidate


def _sharpen(fitting: list[_Candidate], budget: int) -> None:
    """Price all rows of the bound, and build again at those prices."""
    from adjcomp.passes.schedule.relaxation import priced_bound

    for candidate in _worth_a_look(fitting, OPTIMAL_GAP):
        bound = priced_bound(candidate.instance, budget, candidate.choice, candidate.bound)
        built = greedy(candidate.instance, budget, (bound,))
        candidate.bound = bound
        candidate.choice = min(candidate.choice, built, key=lambda choice: choice.ticks)


def _refine(fitting: list[_Candidate], budget: int, limit: float) -> None:
    """Search exactly, best bound first, where a chunk length can still gain, until `limit` deterministic seconds are spent."""
    from adjcomp.passes.schedule.tile_mode import solve_counts

    gap = OPTIMAL_GAP if max(c.instance.costs.chunk_count for c in fitting) <= FEW_CHUNKS else SMALL_GAP
    left = limit
    for candidate in _worth_a_look(fitting, gap):
        if left < LEAST_LIMIT:
            break
        solved = solve_counts(candidate.instance, budget, candidate.choice, candidate.bound, min(left, limit / 2), gap / 10)
        candidate.choice = solved.choice
        candidate.bound = replace(candidate.bound, ticks=max(candidate.bound.ticks, solved.bound))
        left -= solved.effort


def _certified(plan: Plan, bound: float, chunks: tuple[int, ...], *, searched: bool) -> Plan:
    """`plan` with its lower bound and status."""
    bound = max(0.0, min(bound, plan.seconds))
    close = bound >= plan.seconds * (1 - OPTIMAL_GAP)
    status = (Status.OPTIMAL if close else Status.FEASIBLE) if searched else Status.HEURISTIC
    return replace(plan, certificate=replace(plan.certificate, lower_bound_seconds=bound, status=status, chunks=chunks))


def _budget_error(instances: dict[int, Instance], minima: dict[int, int], budget: int, device: str) -> BudgetError:
    """The error for a budget below every minimum, with what is live at the peak of the smallest plan."""
    chunk = min(minima, key=lambda length: (minima[length], length))
    instance, minimum = instances[chunk], minima[chunk]
    plan = build_plan(instance.costs, instance.modes(lean_choice(instance, minimum).options), minimum, device)
    return BudgetError(budget, minimum, plan.bytes_by_kind)
