"""One chunk length in the race: its best plan so far, and its bound."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action
from adjcomp.ir.modes import ColumnMode
from adjcomp.passes.emit import emit
from adjcomp.passes.nesting import emit_nested
from adjcomp.passes.schedule.bound import Bound, lower_bound
from adjcomp.passes.schedule.greedy import Choice, greedy, in_order, lean_choice, least_need
from adjcomp.passes.schedule.instance import Instance
from adjcomp.passes.schedule.needs import nested_minimum
from adjcomp.passes.schedule.nested import Nested

ROUNDING = 1e-9  # relative room for the rounding of times to ticks in a bound


@dataclass
class Candidate(ABC):
    """A chunk length and a way to plan it."""

    instance: Instance

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds of the best plan so far."""

    @property
    @abstractmethod
    def bound_seconds(self) -> float:
        """Seconds that no plan of this chunk length and way goes below."""

    @property
    @abstractmethod
    def recomputes(self) -> bool:
        """Whether the best plan so far runs some tile again."""

    @abstractmethod
    def actions(self) -> tuple[Action, ...]:
        """The actions of the best plan so far."""


@dataclass
class Flat(Candidate):
    """Every border is stored; choice and bound get better on the way."""

    choice: Choice
    bound: Bound

    @property
    def seconds(self) -> float:
        return self.choice.ticks * self.instance.tick

    @property
    def bound_seconds(self) -> float:
        return self.bound.ticks * self.instance.tick * (1 - ROUNDING)

    @property
    def recomputes(self) -> bool:
        return any(mode.top_recomputed(self.instance.costs) is not None for mode in set(self.modes()))

    def actions(self) -> tuple[Action, ...]:
        return emit(self.instance.costs, self.modes())

    def modes(self) -> list[ColumnMode]:
        """The modes of the choice, in the order that fits."""
        return self.instance.modes(in_order(self.instance, self.choice))


@dataclass
class Folded(Candidate):
    """Some borders are recomputed; the dynamic program's answer is its own bound."""

    nested: Nested

    @property
    def seconds(self) -> float:
        return self.nested.ticks * self.instance.tick

    @property
    def bound_seconds(self) -> float:
        return self.seconds * (1 - ROUNDING)

    @property
    def recomputes(self) -> bool:
        return True

    def actions(self) -> tuple[Action, ...]:
        return emit_nested(self.instance.costs, self.nested.modes, self.nested.runs)


def flat_candidates(instances: Sequence[Instance], budget: int, known: float = math.inf) -> list[Flat]:
    """Bounds and constructive plans of the chunk lengths that fit; those that can't be the best, or faster than `known` seconds,
    take a lean plan.
    """
    bounds = [(lower_bound(i, budget), i) for i in instances if flat_minimum(i) <= budget]
    found: list[Flat] = []
    best = known
    for bound, instance in sorted(bounds, key=lambda pair: (pair[0].ticks * pair[1].tick, pair[1].costs.chunk)):
        hopeless = bound.ticks * instance.tick * (1 - ROUNDING) >= best
        choice = lean_choice(instance, budget) if hopeless else greedy(instance, budget, (bound,))
        found.append(Flat(instance, choice, bound))
        best = min(best, found[-1].seconds)
    return found


def worth_a_look(flat: list[Flat], known: float, gap: float) -> Iterator[Flat]:
    """Candidates that may beat the best plan, or `known` seconds, by more than `gap`; best bound first."""
    for candidate in sorted(flat, key=lambda c: (c.bound_seconds, c.instance.costs.chunk)):
        if candidate.bound_seconds < min(known, *(c.seconds for c in flat)) * (1 - gap):
            yield candidate


def minimum_bytes(instance: Instance) -> int:
    """The smallest budget of any plan of the instance."""
    return flat_minimum(instance) if instance.reserved_bytes else min(flat_minimum(instance), nested_minimum(instance))


def flat_minimum(instance: Instance) -> int:
    """The smallest budget of a plan that stores every border where the instance says."""
    return max(int(least_need(instance)[0]), instance.fixed_bytes)
