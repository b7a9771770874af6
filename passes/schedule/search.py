"""The planner for one device: chunk length and tile modes together.

For each chunk length the relaxation gives a lower bound and prices, and the prices a constructive plan. Chunk lengths whose
bound is above the best plan are out. Where borders are what is scarce, nested plans join the race. The exact search then runs
where something is left to gain, best bound first. What it leaves open is the certificate's gap: the smallest bound over all
chunk lengths against the plan.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from adjcomp.errors import BudgetError
from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Certificate, HostTier, Plan, Share, Status
from adjcomp.options import Options
from adjcomp.passes.schedule.away import (
    holds_all,
    partly_candidates,
    rounded_candidates,
    rounded_instances,
    spilled_candidates,
    spilled_instances,
)
from adjcomp.passes.schedule.candidates import (
    ROUNDING,
    Candidate,
    Flat,
    Folded,
    flat_candidates,
    minimum_bytes,
    worth_a_look,
)
from adjcomp.passes.schedule.collector import uncollected
from adjcomp.passes.schedule.greedy import greedy
from adjcomp.passes.schedule.instance import Instance, build_instance
from adjcomp.passes.schedule.layered import Layering, is_possible, layered_candidates
from adjcomp.passes.schedule.minimum import check_layered
from adjcomp.passes.schedule.needs import nested_minimum
from adjcomp.passes.schedule.nested import Nesting
from adjcomp.passes.schedule.partly import splits_of
from adjcomp.passes.schedule.spaces import LAYERED_SPACE, ROUNDED_SPACE, SPACE, SPILLED_SPACE
from adjcomp.passes.schedule.tiers import pairs_of, tiered_candidates
from adjcomp.passes.simulate import simulate

DEFAULT_LIMIT = 0.6  # deterministic seconds of search for a plan
LEAST_LIMIT = 1e-3  # below this no search is started
OPTIMAL_GAP = 1e-6  # relative gap that counts as none
SMALL_GAP = 1e-3  # gap at which the search of long sequences stops
FEW_CHUNKS = 24  # up to which the search goes on until nothing is left


@dataclass(frozen=True)
class Search:
    """What a plan on one device is searched for: the arguments of `solve`, but the costs."""

    seq_len: int
    budget_bytes: int
    candidates: Sequence[int]
    device: str
    options: Options
    host: HostTier | None = None

    @property
    def limit(self) -> float:
        """Deterministic seconds of exact search."""
        given = self.options.solver_time_limit_seconds
        return DEFAULT_LIMIT if given is None else given


@dataclass(frozen=True)
class Outcome:
    """What a search found: its best candidate, and a bound on all of them."""

    search: Search
    best: Candidate
    bound: float  # seconds
    lengths: tuple[int, ...]
    space: str
    searched: bool  # whether there was time for the exact search

    def plan(self) -> Plan:
        """The best candidate, written as a plan."""
        used = None if self.best.instance.spill is None else self.search.host
        with uncollected():
            plan = build_plan(self.best.instance.costs, self.best.actions(), self.search.budget_bytes, self.search.device, used)
        return _certified(plan, self.bound, self.lengths, self.space, searched=self.searched)


def solve(
    costs: Callable[[int], StackCosts],
    *,
    seq_len: int,
    budget_bytes: int,
    candidates: Sequence[int],
    device: str,
    options: Options,
    host: HostTier | None = None,
) -> Plan:
    """The fastest plan found for one step on one device.

    Args:
        costs: the cost tables at a chunk length; called once for each candidate.
        seq_len: tokens along time.
        budget_bytes: most bytes live at any action.
        candidates: chunk lengths to choose from, tokens; longer ones than `seq_len` count as `seq_len`.
        device: the device's name in the plan.
        options: `solver_time_limit_seconds` and `border_dtype` are used here.
        host: where borders may be spilled to; None: they stay on the device.

    Raises:
        BudgetError: no plan with any of the chunk lengths fits; its `minimum_bytes` does.
        ValueError: no candidates, an empty sequence, or nothing that takes a gradient.
    """
    outcome = race(costs, Search(seq_len, budget_bytes, candidates, device, options, host))
    assert outcome is not None  # nothing was known that could be faster
    return outcome.plan()


def race(costs: Callable[[int], StackCosts], search: Search, known: float = math.inf) -> Outcome | None:
    """The search of `solve`, without writing the plan; None where nothing can be faster than `known` seconds.

    Raises: as `solve`.
    """
    budget, device = search.budget_bytes, search.device
    instances = _instances(costs, search.seq_len, search.candidates, device, budget)
    away = [] if search.host is None else spilled_instances(instances, device, search.host)
    splits, pairs, spilled = splits_of(instances, away), pairs_of(instances, away), [i for i in away if holds_all(i)]
    rounded = [] if search.options.border_dtype is None else rounded_instances(instances, device)
    minima = [(minimum_bytes(i), i.costs.chunk, i) for i in (*instances, *spilled, *rounded)]
    minima += [(split.minimum(), split.resident.costs.chunk, split.resident) for split in splits]
    minima += [(nested_minimum(pair.resident, pair.host), pair.resident.costs.chunk, pair.resident) for pair in pairs]
    least, _, leanest = min(minima, key=lambda row: row[:2])
    layerings = [Layering(instance) for instance in instances if is_possible(instance.costs)]
    if least > budget:
        check_layered(layerings, budget, least, leanest, device)
    flat = flat_candidates(instances, budget, known)
    flat += spilled_candidates(spilled, budget, known)
    flat += rounded_candidates(rounded, budget, known)
    limit = search.limit
    if _has_solver():
        _sharpen(flat, known, budget)
    else:
        warnings.warn("OR-Tools is not installed: planned by construction (pip install ortools)", RuntimeWarning, stacklevel=2)
        limit = 0.0
    candidates: list[Candidate] = [*flat, *_fold(instances, flat, known, budget)]
    candidates += layered_candidates(layerings, budget, min([known, *(candidate.seconds for candidate in candidates)]))
    if limit >= LEAST_LIMIT and candidates:
        _refine(flat, min(known, *(candidate.seconds for candidate in candidates)), budget, limit)
    more, bound = partly_candidates(splits, flat, budget, min([known, *(c.seconds for c in candidates)]))
    candidates += more
    candidates += tiered_candidates(pairs, budget, min([known, *(c.seconds for c in candidates)]))
    if not candidates:
        return None
    best = min(candidates, key=lambda c: (c.seconds, c.instance.costs.chunk))
    bound = min(known, bound, *(candidate.bound_seconds for candidate in candidates))
    lengths = tuple(instance.costs.chunk for instance in instances)
    space = SPACE + (LAYERED_SPACE if layerings else "") + (SPILLED_SPACE if away else "") + (ROUNDED_SPACE if rounded else "")
    return Outcome(search, best, bound, lengths, space, limit >= LEAST_LIMIT)


def solve_forms(forms: Iterable[Callable[[int], StackCosts]], search: Search) -> tuple[int, Plan]:
    """The fastest plan of several forms of a stack's tiles, from those that keep most to the leanest, and which form it is.

    A form that keeps less is tried where the best so far runs some tile again. The bound speaks of all that were tried.

    Raises:
        BudgetError: none fits; the numbers are those of the last.
    """
    best: Outcome | None = None
    chosen, bound = 0, math.inf
    error: BudgetError | None = None
    for index, costs in enumerate(forms):
        if best is not None and not best.best.recomputes:
            break
        try:
            found = race(costs, search, math.inf if best is None else best.best.seconds)
        except BudgetError as refused:
            error = refused
            continue
        if found is not None:
            bound = min(bound, found.bound)
            if best is None or found.best.seconds < best.best.seconds:
                best, chosen = found, index
    if best is None:
        raise error or ValueError("there is no form of the tiles to plan with")
    return chosen, replace(best, bound=bound).plan()


def build_plan(
    costs: StackCosts, actions: tuple[Action, ...], budget_bytes: int, device: str, host: HostTier | None = None
) -> Plan:
    """The plan of `actions`, with exact peak and seconds, and no bound yet."""
    share = Share(device, budget_bytes, dict(costs.resident_bytes), dict(costs.turn_bytes), host=host)
    totals = simulate(costs, (share,), actions)
    certificate = Certificate(
        totals.peak_bytes,
        totals.bytes_by_kind,
        totals.seconds,
        0.0,
        Status.HEURISTIC,
        SPACE,
        (costs.chunk,),
        totals.host_peak_bytes,
    )
    return Plan(costs, (share,), certificate, actions)


def _has_solver() -> bool:
    """Whether OR-Tools can be imported."""
    try:
        return importlib.util.find_spec("ortools") is not None
    except ImportError:  # an import hook that forbids it
        return False


def _instances(
    costs: Callable[[int], StackCosts], seq_len: int, candidates: Sequence[int], device: str, budget_bytes: int
) -> list[Instance]:
    """The instances of all chunk lengths, shortest first."""
    if seq_len < 1:
        raise ValueError(f"a sequence has at least one token, not {seq_len}")
    lengths = sorted({min(int(length), seq_len) for length in candidates})
    if not lengths or lengths[0] < 1:
        raise ValueError(f"chunk lengths must be positive and there must be one; got {list(candidates)}")
    tables = [costs(length) for length in lengths]
    return [build_instance(table, Share(device, budget_bytes, table.resident_bytes, table.turn_bytes)) for table in tables]


def _sharpen(flat: list[Flat], known: float, budget: int) -> None:
    """Price all rows of the bound where a plan may be faster than `known` seconds, and build again at those prices."""
    from adjcomp.passes.schedule.relaxation import priced_bound

    for candidate in worth_a_look(flat, known, OPTIMAL_GAP):
        bound = priced_bound(candidate.instance, budget, candidate.choice, candidate.bound)
        built = greedy(candidate.instance, budget, (bound,))
        candidate.bound = bound
        candidate.choice = min(candidate.choice, built, key=lambda choice: choice.ticks)


def _fold(instances: Sequence[Instance], flat: Sequence[Flat], known: float, budget: int) -> list[Folded]:
    """Nested plans of all chunk lengths at which one could be the best, and faster than `known` seconds, most promising first."""
    found: list[Folded] = []
    promises = [(n.quick_bound() * n.instance.tick, n) for n in (Nesting(i, budget) for i in instances) if n.feasible]
    for promise, nesting in sorted(promises, key=lambda pair: (pair[0], pair[1].instance.costs.chunk)):
        if promise * (1 - ROUNDING) < min([known, *(c.seconds for c in (*flat, *found))]):
            nested = nesting.solve()
            if nested is not None:
                found.append(Folded(nesting.instance, nested))
    return found


def _refine(flat: list[Flat], known: float, budget: int, limit: float) -> None:
    """Search exactly where a chunk length can still beat `known` seconds, until `limit` deterministic seconds are spent."""
    from adjcomp.passes.schedule.tile_mode import solve_counts

    few = all(candidate.instance.costs.chunk_count <= FEW_CHUNKS for candidate in flat)
    gap, left = OPTIMAL_GAP if few else SMALL_GAP, limit
    for candidate in worth_a_look(flat, known, gap):
        if left < LEAST_LIMIT:
            break
        solved = solve_counts(candidate.instance, budget, candidate.choice, candidate.bound, min(left, limit / 2), gap / 10)
        candidate.choice = solved.choice
        candidate.bound = replace(candidate.bound, ticks=max(candidate.bound.ticks, solved.bound))
        left -= solved.effort


def _certified(plan: Plan, bound: float, chunks: tuple[int, ...], space: str, *, searched: bool) -> Plan:
    """`plan` with its lower bound, of what space, and its status."""
    bound = max(0.0, min(bound, plan.seconds))
    close = bound >= plan.seconds * (1 - OPTIMAL_GAP)
    status = (Status.OPTIMAL if close else Status.FEASIBLE) if searched else Status.HEURISTIC
    return replace(
        plan, certificate=replace(plan.certificate, lower_bound_seconds=bound, status=status, space=space, chunks=chunks)
    )
