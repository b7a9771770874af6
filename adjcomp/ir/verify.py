"""The proof of a plan: an abstract machine that replays every action and checks each rule, each byte and the certificate.

It shares no code with the planner: the rules of the actions are written down here a second time, from their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.kinds import by_kind
from adjcomp.ir.plan import Plan
from adjcomp.ir.values import Kind, Value

NEIGHBOURS = 3  # actions shown on each side of the failing one


def verify_plan(plan: Plan) -> None:
    """Replay `plan`.

    Raises:
        VerifyError: an action breaks its rule or the budget, something is missing at the end, or the certificate is wrong.
    """
    machine = _Replay(plan)
    for index, action in enumerate(plan.actions):
        try:
            machine.step(action)
        except _BrokenRule as broken:
            raise VerifyError(f"{broken}\n{neighbourhood(plan, index)}") from None
    try:
        machine.finish()
    except _BrokenRule as broken:
        raise VerifyError(f"{broken}\n{neighbourhood(plan, len(plan.actions))}") from None
    _check_certificate(plan, machine)


def neighbourhood(plan: Plan, index: int) -> str:
    """The actions around `index`, with an arrow at it."""
    first, last = max(0, index - NEIGHBOURS), min(len(plan.actions), index + NEIGHBOURS + 1)
    lines = [f"{'-->' if i == index else '   '} {i:>6}  {describe(plan.actions[i])}" for i in range(first, last)]
    if index == len(plan.actions):
        lines.append(f"--> {index:>6}  (end of the plan)")
    return "\n".join(lines)


def describe(action: Action) -> str:
    """One action as a line of text: `Forward(layer=3, chunk=0, keep=True) frees x[2,0]`."""
    own = ", ".join(
        f"{name}={getattr(action, name)}" for name in ("layer", "chunk", "keep") if name in type(action).__match_args__
    )
    place = f" on device {action.device}" if action.device else ""
    frees = f" frees {' '.join(str(value) for value in action.frees)}" if action.frees else ""
    return f"{type(action).__name__}({own}){place}{frees}"


class _BrokenRule(Exception):
    """An action can't run; the text says why."""


@dataclass(frozen=True)
class _Rule:
    """What one kind of action does on one layer, with chunks relative to its own."""

    reads: tuple[tuple[Kind, int, int], ...]  # kind, layer, chunk relative to the action's
    writes: tuple[tuple[Kind, int, int, int], ...]  # kind, layer, relative chunk, bytes
    owns: tuple[tuple[Kind, int, int], ...]  # values that the action consumes: it has to free them
    workspace: int
    seconds: float


class _Replay:
    """Memory of every device, and which work is done."""

    def __init__(self, plan: Plan) -> None:
        self.costs = plan.costs
        self.shares = plan.shares
        self.live: list[dict[Value, int]] = [{} for _ in plan.shares]
        self.held = [dict.fromkeys(Kind, 0) for _ in plan.shares]
        self.fixed = [sum(share.resident_bytes.values()) for share in plan.shares]
        self.bytes = [0 for _ in plan.shares]
        self.peak = [0 for _ in plan.shares]
        self.peak_kinds: list[dict[str, int]] = [{} for _ in plan.shares]
        self.seconds: list[float] = []
        self.done: set[tuple[str, int, int]] = set()
        self.started = self.turned = False
        self.adjoints_left = {k: self.costs.chunk_count for k in range(self.costs.head + 1) if self.costs.tile(k, 0).has_vjp}
        self._rules: dict[tuple[type[Action], int, bool, bool], _Rule] = {}

    def step(self, action: Action) -> None:
        """Run one action."""
        if not 0 <= action.device < len(self.shares):
            raise _BrokenRule(f"there is no device {action.device}")
        match action:
            case Start():
                self._start()
                self._run(action, 0, self._initial(Kind.CARRY, -1))
            case Turn():
                self._turn(action.device)
                self._run(action, 0, self._initial(Kind.ADJOINT, self.costs.chunk_count - 1))
            case Publish(layer=layer):
                self._publish(layer)
                self._run(action, 0, _Rule((), (), (), self.costs.publish_bytes[layer], 0.0))
            case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
                self._tile(action, layer, chunk, keep)
            case Loss(chunk=chunk, keep=keep):
                self._tile(action, self.costs.head, chunk, keep)
            case Advance(layer=layer, chunk=chunk):
                self._tile(action, layer, chunk, False)
            case Adjoint(layer=layer, chunk=chunk):
                self._tile(action, layer, chunk, True)
            case HeadVjp(chunk=chunk):
                self._tile(action, self.costs.head, chunk, True)
            case _:
                raise _BrokenRule(f"no rule for {type(action).__name__}")

    def finish(self) -> None:
        """Check that all work is done and nothing is left."""
        if not self.turned:
            raise _BrokenRule("the plan never turns to the backward")
        for layer, left in self.adjoints_left.items():
            if left:
                raise _BrokenRule(f"layer {layer} has {left} of {self.costs.chunk_count} adjoints missing")
            if ("Publish", layer, 0) not in self.done:
                raise _BrokenRule(f"the gradients of layer {layer} are never published")
        for device, live in enumerate(self.live):
            if live:
                names = ", ".join(str(value) for value in list(live)[:5])
                raise _BrokenRule(f"{len(live)} values are never freed on device {device}: {names}")

    def _start(self) -> None:
        if self.started:
            raise _BrokenRule("the plan starts twice")
        self.started = True

    def _turn(self, device: int) -> None:
        if not self.started or self.turned:
            raise _BrokenRule("the turn comes once, after the start")
        missing = [
            (k, c)
            for c in range(self.costs.chunk_count)
            for k in range(self.costs.head + 1)
            if ("Forward", k, c) not in self.done
        ]
        if missing:
            raise _BrokenRule(
                f"the forward of {len(missing)} tiles is missing, first layer {missing[0][0]}, chunk {missing[0][1]}"
            )
        self.turned = True
        self.fixed[device] += sum(self.shares[device].turn_bytes.values())

    def _publish(self, layer: int) -> None:
        if self.adjoints_left.get(layer) != 0:
            raise _BrokenRule(f"layer {layer} has no complete gradients to publish")
        self._once("Publish", layer, 0)

    def _once(self, what: str, layer: int, chunk: int) -> None:
        if (what, layer, chunk) in self.done:
            raise _BrokenRule(f"{what} of layer {layer}, chunk {chunk} is done a second time")
        self.done.add((what, layer, chunk))

    def _tile(self, action: Action, layer: int, chunk: int, keep: bool) -> None:
        """Run an action on one tile."""
        if not self.started:
            raise _BrokenRule("the plan has to start first")
        kind = type(action)
        if not (0 <= layer <= self.costs.head and 0 <= chunk < self.costs.chunk_count):
            raise _BrokenRule(f"there is no tile of layer {layer}, chunk {chunk}")
        if layer == self.costs.head and kind in (Forward, Adjoint):
            raise _BrokenRule(f"{kind.__name__} is for the stem and the layers; the head has Loss and HeadVjp")
        if self.turned == (kind in (Forward, Loss)):
            raise _BrokenRule(f"{kind.__name__} belongs {'before' if self.turned else 'after'} the turn")
        tile = self.costs.tile(layer, chunk)
        if keep and not tile.has_vjp:
            raise _BrokenRule(f"layer {layer} has no VJP: nothing to keep internals for and nothing to run")
        if kind in (Forward, Loss):
            self._once("Forward", layer, chunk)
        elif kind in (Adjoint, HeadVjp):
            self._once("Adjoint", layer, chunk)
            self.adjoints_left[layer] -= 1
        key = (kind, layer, keep, chunk == self.costs.chunk_count - 1)
        if key not in self._rules:
            self._rules[key] = _tile_rule(self.costs, kind, layer, chunk, keep)
        self._run(action, chunk, self._rules[key])

    def _run(self, action: Action, chunk: int, rule: _Rule) -> None:
        """Check what `rule` reads, account for its peak, then write and free."""
        device = action.device
        live, held = self.live[device], self.held[device]
        for kind, layer, offset in rule.reads:
            if (kind, layer, chunk + offset) not in live:
                raise _BrokenRule(f"reads {Value(kind, layer, chunk + offset)}, which isn't live")
        before, kinds = self.bytes[device], dict(held)
        for kind, layer, offset, size in rule.writes:
            value = Value(kind, layer, chunk + offset)
            if value in live:
                raise _BrokenRule(f"writes {value}, which is live already")
            live[value] = size
            held[kind] += size
            self.bytes[device] += size
        for value in action.frees:
            if value not in live:
                raise _BrokenRule(f"frees {value}, which isn't live")
            size = live.pop(value)
            held[value.kind] -= size
            self.bytes[device] -= size
        for kind, layer, offset in rule.owns:
            if (kind, layer, chunk + offset) in live:
                raise _BrokenRule(f"consumes {Value(kind, layer, chunk + offset)} but doesn't free it")
        self.seconds.append(rule.seconds)
        self._account(device, kinds, max(rule.workspace, self.bytes[device] - before))

    def _account(self, device: int, held: dict[Kind, int], extra: int) -> None:
        """Compare the peak of an action with the budget; `held` are the bytes that were live when it started."""
        share = self.shares[device]
        peak = self.fixed[device] + sum(held.values()) + extra
        if peak > share.budget_bytes:
            raise _BrokenRule(
                f"needs {peak} bytes on {share.name}, {peak - share.budget_bytes} over its budget of {share.budget_bytes}"
            )
        if peak > self.peak[device]:
            self.peak[device] = peak
            self.peak_kinds[device] = by_kind(share.resident_bytes, share.turn_bytes if self.turned else {}, held, extra)

    def _initial(self, kind: Kind, chunk: int) -> _Rule:
        """The initial states (before chunk 0) or the adjoint states of the end (after the last chunk), all at once."""
        writes = []
        for layer in range(self.costs.head + 1):
            tile = self.costs.tile(layer, max(chunk, 0))
            if tile.carry_bytes > 0 and (kind is Kind.CARRY or tile.has_vjp):
                writes.append((kind, layer, chunk, tile.carry_bytes if kind is Kind.CARRY else tile.adjoint_bytes))
        return _Rule((), tuple(writes), (), sum(size for *_, size in writes), 0.0)


def _tile_rule(costs: StackCosts, action: type[Action], layer: int, chunk: int, keep: bool) -> _Rule:
    """The rule of `action` on a tile."""
    tile = costs.tile(layer, chunk)
    if action in (Adjoint, HeadVjp):
        previous = costs.tile(layer, max(chunk - 1, 0))
        below = costs.tile(layer - 1, chunk) if layer > 0 else None
        owns = [(Kind.KEEP, layer, 0)] + ([(Kind.COTANGENT, layer, 0)] if layer < costs.head else [])
        writes = tuple(_vjp_writes(tile, below, previous, layer))
        return _Rule(
            tuple(_vjp_reads(costs, tile, layer)), writes, tuple(owns), tile.adjoint_workspace_bytes, tile.adjoint_seconds
        )
    reads = [(Kind.STREAM, layer - 1, 0)] if layer > 0 else []
    made = [(Kind.STREAM, layer, 0, tile.stream_bytes)] if layer < costs.head else []
    if tile.carry_bytes > 0:
        reads.append((Kind.CARRY, layer, -1))
        if action is not Recompute:
            made.append((Kind.CARRY, layer, 0, tile.carry_bytes))
    if keep:
        made.append((Kind.KEEP, layer, 0, tile.keep_bytes))
    workspace = tile.keep_workspace_bytes if keep else tile.forward_workspace_bytes
    return _Rule(tuple(reads), tuple(made), (), workspace, tile.keep_seconds if keep else tile.forward_seconds)


def _vjp_reads(costs: StackCosts, tile: TileCost, layer: int) -> Iterator[tuple[Kind, int, int]]:
    """Everything the VJP of a tile looks at."""
    yield Kind.KEEP, layer, 0
    if layer < costs.head:
        yield Kind.COTANGENT, layer, 0
        if tile.reads_output:
            yield Kind.STREAM, layer, 0
    if tile.reads_input and layer > 0:
        yield Kind.STREAM, layer - 1, 0
    if tile.carry_bytes > 0:
        yield Kind.ADJOINT, layer, 0
        if tile.reads_carry:
            yield Kind.CARRY, layer, -1


def _vjp_writes(tile: TileCost, below: TileCost | None, previous: TileCost, layer: int) -> Iterator[tuple[Kind, int, int, int]]:
    """The cotangents of a tile's inputs."""
    if below is not None and tile.passes_cotangent:
        yield Kind.COTANGENT, layer - 1, 0, below.cotangent_bytes
    if tile.carry_bytes > 0:
        yield Kind.ADJOINT, layer, -1, previous.adjoint_bytes


def _check_certificate(plan: Plan, machine: _Replay) -> None:
    """Compare what was promised with what the replay found."""
    promised = plan.certificate
    for share, peak, kinds in zip(plan.shares, machine.peak, machine.peak_kinds, strict=True):
        if promised.peak_bytes.get(share.name) != peak:
            raise VerifyError(
                f"the certificate promises a peak of {promised.peak_bytes.get(share.name)} bytes on {share.name}; it is {peak}"
            )
        if promised.bytes_by_kind.get(share.name) != kinds:
            raise VerifyError(
                f"the certificate says {promised.bytes_by_kind.get(share.name)} are live at the peak; it is {kinds}"
            )
    if promised.seconds != math.fsum(machine.seconds):
        raise VerifyError(
            f"the certificate promises {promised.seconds!r} seconds; the actions take {math.fsum(machine.seconds)!r}"
        )
    if not 0 <= promised.lower_bound_seconds <= promised.seconds:
        raise VerifyError(f"the lower bound of {promised.lower_bound_seconds!r} seconds isn't between 0 and {promised.seconds!r}")
