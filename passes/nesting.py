"""Nested steps to actions: what is stored follows from what is read later, and what waits on the host from how deep it lies.

A step is a row of sweeps over single chunks: forwards, advances, and backwards. The border before a chunk is made by a sweep
over the chunk before it and read at once by the next sweep, which is over the chunk. Where later sweeps read it again it is
*stored*. Stored borders are a stack: those that were stored last are needed first. The deepest of them may wait on the host.
Such a one is offloaded when it is made, leaves the device when the next sweep has read it, and is brought back during the
backward that comes before each of its later reads: as a copy that is loaded, and for the last of them by a fetch, so that its
place is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from adjcomp.ir.actions import Action, Advance, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.ir.values import Kind, Value, adjoint, carry, has_adjoint, has_carry
from adjcomp.passes.emit import Column, backward_column, check_modes, forward_column, publications
from adjcomp.passes.lifetimes import drop_after_last_use

COPIES = 1  # the stream of transfers


@dataclass(frozen=True)
class Run:
    """One piece of a nested backward: advance over chunks first … end - 1, or, where they are equal, reverse chunk `first`."""

    first: int
    end: int


class SweepKind(Enum):
    """What a sweep does."""

    FORWARD = "forward"
    ADVANCE = "advance"
    TURN = "turn"  # the last chunk's forward and backward
    BACKWARD = "backward"


@dataclass(frozen=True)
class Sweep:
    """One chunk's way up, which leaves its border, or its backward."""

    kind: SweepKind
    chunk: int
    mode: ColumnMode

    @property
    def up(self) -> bool:
        """Whether it leaves the chunk's border."""
        return self.kind in (SweepKind.FORWARD, SweepKind.ADVANCE)

    def ways(self, costs: StackCosts) -> tuple[list[Action], list[Action]]:
        """Its actions before and after the borders that it reads may be dropped for others, without what they drop."""
        match self.kind:
            case SweepKind.FORWARD:
                return list(forward_column(costs, self.chunk, self.mode)), []
            case SweepKind.ADVANCE:
                highest = max(k for k in range(costs.head + 1) if has_carry(costs.tile(k, 0)))
                return [Advance(layer, self.chunk) for layer in range(highest + 1)], []
            case SweepKind.TURN:
                up, down = forward_column(costs, self.chunk, self.mode), backward_column(costs, self.chunk, self.mode)
                return [*up, Turn(0, costs.head)], list(down)
            case SweepKind.BACKWARD:
                return [], list(backward_column(costs, self.chunk, self.mode))


@dataclass(frozen=True)
class Copies:
    """What a sweep moves between the device and the host."""

    out: bool = False  # the border that it leaves is offloaded
    back: int | None = None  # chunk after the border that it brings back; None: none
    last: bool = False  # whether that one is read for the last time
    ahead: bool = False  # bring it when the backward begins, not each layer's as the border of the same layer is dropped


NO_COPIES = Copies()


@dataclass(frozen=True)
class Tier:
    """The host under a nested plan."""

    places: int  # of the stored borders, how many of the deepest wait there
    ahead: bool  # a border is brought when the backward before it begins: two sets of borders are on the device


def emit_nested(
    costs: StackCosts, modes: Sequence[ColumnMode], runs: Sequence[Run], tier: Tier | None = None
) -> tuple[Action, ...]:
    """The actions of a step whose backward consists of `runs`; with a `tier`, its deepest borders wait on the host.

    Columns of a kind differ in time, in which of the borders around them are read later and in what they copy, so what they drop
    is found once for each case; the last chunk, which is reversed at once, is a case of its own.
    """
    check_modes(costs, modes)
    sweeps = sweeps_of(modes, runs)
    copies, first = copies_of(sweeps, tier) if tier is not None else ([NO_COPIES] * len(sweeps), False)
    actions: list[Action] = [Start(0, costs.head)]
    if first:
        actions += [Offload(carry(k, -1), stream=COPIES) for k in _layers(costs)]
    for column, chunk in _with_drops(costs, sweeps, copies, first):
        actions.extend(column.at(chunk))
    return (*actions, *publications(costs))


def sweeps_of(modes: Sequence[ColumnMode], runs: Sequence[Run]) -> list[Sweep]:
    """The sweeps of a step: `modes[c]` says what chunk c keeps."""
    last, nothing = len(modes) - 1, ColumnMode(0)
    sweeps = [Sweep(SweepKind.FORWARD, chunk, modes[chunk]) for chunk in range(last)]
    sweeps.append(Sweep(SweepKind.TURN, last, modes[last]))
    for run in runs[1:]:
        sweeps += [Sweep(SweepKind.ADVANCE, chunk, nothing) for chunk in range(run.first, run.end)]
        if run.first == run.end:
            sweeps.append(Sweep(SweepKind.BACKWARD, run.first, modes[run.first]))
    return sweeps


def copies_of(sweeps: Sequence[Sweep], tier: Tier) -> tuple[list[Copies], bool]:
    """What each sweep copies, and whether the initial states are offloaded: borders with fewer than `places` below them are."""
    lives = _lives(sweeps)
    made = [NO_COPIES] * len(sweeps)
    stack: list[int] = []  # last reads of stored borders
    initial = False
    for born, reads in lives:
        while stack and stack[-1] <= born:
            stack.pop()
        if len(reads) < 2:
            continue
        stack.append(reads[-1])
        if len(stack) > tier.places:
            continue
        if born < 0:
            initial = True
        else:
            made[born] = Copies(out=True)
        for read in reads[1:]:
            made[read - 1] = Copies(False, sweeps[read].chunk, read == reads[-1], tier.ahead)
    return made, initial


def _lives(sweeps: Sequence[Sweep]) -> list[tuple[int, list[int]]]:
    """Every border from when it is made until it is made again: the sweep that leaves it (-1: the start), and those that read it.

    In the order in which they are made.
    """
    latest: dict[int, list[int]] = {0: []}  # by the chunk after it
    lives = [(-1, latest[0])]
    for index, sweep in enumerate(sweeps):
        latest[sweep.chunk].append(index)
        if sweep.up:
            latest[sweep.chunk + 1] = []
            lives.append((index, latest[sweep.chunk + 1]))
    return lives


def _with_drops(costs: StackCosts, sweeps: Sequence[Sweep], copies: Sequence[Copies], away: bool) -> list[tuple[Column, int]]:
    """The sweeps with what they drop, each as a column and the chunk that it is on. away: the initial states are offloaded."""
    layers = _layers(costs)
    stays: set[int] = set()  # chunks whose borders are read later, before they are made or brought again
    made: dict[tuple[object, ...], Column] = {}
    found = []
    for sweep, copy in zip(reversed(sweeps), reversed(copies), strict=True):
        c, end = sweep.chunk, costs.chunk_count - 1
        if copy.back is not None:
            stays.discard(copy.back - 1)
        around = (c - 1 in stays, sweep.up and c in stays)
        back = None if copy.back is None else copy.back - c
        key = (sweep.kind, sweep.mode, c == 0, c == end, around, copy.out, back, copy.last)
        if key not in made:
            borders = [carry(k, chunk) for chunk, wanted in zip((c - 1, c), around, strict=True) if wanted for k in layers]
            borders += [carry(k, copy.back - 1) for k in layers] if copy.back is not None else []
            adjoints = [adjoint(k, c - 1) for k in layers if has_adjoint(costs.tile(k, 0))] if not sweep.up and c > 0 else []
            made[key] = Column(drop_after_last_use(costs, _actions(costs, sweep, copy), later=[*borders, *adjoints]), c)
        found.append((made[key], c))
        stays.discard(c)
        stays.add(c - 1)
    return found[::-1]


def _actions(costs: StackCosts, sweep: Sweep, copies: Copies) -> list[Action]:
    """A sweep with its copies, without what it drops."""
    up, down = sweep.ways(costs)
    if copies.out:
        up = list(_offloading(costs, up, sweep.chunk))
    if copies.back is None:
        return [*up, *down]
    bring: Callable[[Value], Action] = _fetch if copies.last else _load
    coming = [carry(k, copies.back - 1) for k in _layers(costs)]
    return [*up, *bringing(costs, down, coming, bring, ahead=copies.ahead)]


def _offloading(costs: StackCosts, actions: Sequence[Action], chunk: int) -> Iterator[Action]:
    """`actions`, and after each the copies of what it leaves of the border after `chunk`."""
    for action in actions:
        yield action
        for value in action.writes(costs):
            if value.kind is Kind.CARRY and value.chunk == chunk:
                yield Offload(value, stream=COPIES)


def bringing(
    costs: StackCosts, actions: Sequence[Action], coming: Sequence[Value], bring: Callable[[Value], Action], *, ahead: bool
) -> Iterator[Action]:
    """A column's backward that brings back the borders in `coming`, for what comes after it: all at once, or each when the border
    of the same layer has been read here for the last time.
    """
    last_read: dict[int, int] = {}
    if not ahead:
        for index, action in enumerate(actions):
            last_read.update({value.layer: index for value in action.reads(costs) if value.kind is Kind.CARRY})
    after: dict[int, list[Value]] = {}
    for value in coming:
        after.setdefault(last_read.get(value.layer, -1), []).append(value)
    yield from map(bring, after.get(-1, ()))
    for index, action in enumerate(actions):
        yield action
        yield from map(bring, after.get(index, ()))


def _fetch(border: Value) -> Action:
    return Fetch(border, stream=COPIES)


def _load(border: Value) -> Action:
    return Load(border, stream=COPIES)


def _layers(costs: StackCosts) -> list[int]:
    """Layers that hand on a state."""
    return [k for k in range(costs.head + 1) if has_carry(costs.tile(k, 0))]
