"""The abstract machine of the verifier: memory of every device, which work is done, and the clock."""

from __future__ import annotations

from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Free, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.clock import Clock, WaitError
from adjcomp.ir.costs import Tie
from adjcomp.ir.kinds import by_kind
from adjcomp.ir.plan import Plan
from adjcomp.ir.rules import Rule, initial_rule, tile_rule, value_size
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value


class BrokenRule(Exception):
    """An action can't run; the text says why."""


class Replay:
    """Runs actions one after the other and checks each."""

    def __init__(self, plan: Plan) -> None:
        devices = range(len(plan.shares))
        self.costs, self.shares = plan.costs, plan.shares
        self.live: list[dict[Value, int]] = [{} for _ in devices]
        self.held = [dict.fromkeys(Kind, 0) for _ in devices]
        self.fixed = [sum(share.resident_bytes.values()) for share in plan.shares]
        self.bytes = [0 for _ in devices]
        self.peak = list(self.fixed)
        self.peak_kinds = [by_kind(share.resident_bytes, {}, held, 0) for share, held in zip(plan.shares, self.held, strict=True)]
        self.seconds: list[float] = []
        self.done: set[tuple[str, int, int]] = set()
        self.started = [False for _ in devices]
        self.turned = [False for _ in devices]
        self.adjoints_left = {k: self.costs.chunk_count for k in range(self.costs.head + 1) if self.costs.tile(k, 0).has_vjp}
        self.holders: dict[int, set[int]] = {}  # layer -> devices with gradients of it
        self.summing: list[int] = []  # devices whose part of the sum at hand has come by
        self.clock = Clock(plan.wiring, [0.0 for _ in devices]) if plan.wiring is not None else None
        self._rules: dict[tuple[type[Action], int, bool, bool], Rule] = {}

    def step(self, action: Action) -> None:
        """Run one action."""
        if not 0 <= action.device < len(self.shares):
            raise BrokenRule(f"there is no device {action.device}")
        if self.summing and not isinstance(action, Sum | SumTied):
            raise BrokenRule(f"the parts of a sum stand side by side; device {self.summing[-1]} waits for others")
        match action:
            case Start(first=first, last=last):
                self._start(action.device, first, last)
                self._run(action, 0, initial_rule(self.costs, Kind.CARRY, first, last, -1))
            case Turn(first=first, last=last):
                self._turn(action.device, first, last)
                self._run(action, 0, initial_rule(self.costs, Kind.ADJOINT, first, last, self.costs.chunk_count - 1))
            case Publish(layer=layer):
                self._publish(action.device, layer)
                self._run(action, 0, Rule((), (), (), self.costs.publish_bytes[layer], 0.0))
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
            case Free():
                self._run(action, 0, Rule((), (), (), 0, 0.0))
            case Send() | Receive() | Sum() | SumTied():
                try:
                    self._between(action)
                except WaitError as late:
                    raise BrokenRule(f"{late}: a deadlock") from None
            case _:
                raise BrokenRule(f"no rule for {type(action).__name__}")

    def finish(self) -> None:
        """Check that all work is done and nothing is left."""
        if self.summing:
            raise BrokenRule("a sum waits for other devices")
        for device, started in enumerate(self.started):
            if started and not self.turned[device]:
                raise BrokenRule(f"the plan never turns to the backward on device {device}")
        self._all_forward()
        for layer, left in self.adjoints_left.items():
            if left:
                raise BrokenRule(f"layer {layer} has {left} of {self.costs.chunk_count} adjoints missing")
            for device in sorted(self.holders.get(layer, ())):
                if ("Publish", layer, device) not in self.done:
                    raise BrokenRule(f"the gradients of layer {layer} are never published on device {device}")
        if self.clock is not None and (self.clock.posted or self.clock.offered):
            source, target, value = next(iter({**self.clock.posted, **self.clock.offered}))
            raise BrokenRule(f"{value} from device {source} to device {target} has only one side: the other waits for ever")
        for device, live in enumerate(self.live):
            if live:
                names = ", ".join(str(value) for value in list(live)[:5])
                raise BrokenRule(f"{len(live)} values are never freed on device {device}: {names}")

    def _all_forward(self) -> None:
        tiles = ((k, c) for c in range(self.costs.chunk_count) for k in range(self.costs.head + 1))
        missing = [tile for tile in tiles if ("Forward", *tile) not in self.done]
        if missing:
            raise BrokenRule(
                f"the forward of {len(missing)} tiles is missing, first layer {missing[0][0]}, chunk {missing[0][1]}"
            )

    def _start(self, device: int, first: int, last: int) -> None:
        if self.started[device]:
            raise BrokenRule("the plan starts twice")
        self.started[device] = True
        for layer in range(first, last + 1):
            self._once("Start", layer, 0)

    def _turn(self, device: int, first: int, last: int) -> None:
        if not self.started[device] or self.turned[device]:
            raise BrokenRule("the turn comes once, after the start")
        if len(self.shares) == 1:
            self._all_forward()
        self.turned[device] = True
        self.fixed[device] += sum(self.shares[device].turn_bytes.values())
        for layer in range(first, last + 1):
            self._once("Turn", layer, 0)

    def _publish(self, device: int, layer: int) -> None:
        if self.adjoints_left.get(layer) != 0 or device not in self.holders.get(layer, ()):
            raise BrokenRule(f"layer {layer} has no complete gradients to publish")
        if len(self.holders[layer]) > 1 and ("Sum", layer, 0) not in self.done:
            raise BrokenRule(f"the gradients of layer {layer} are on {len(self.holders[layer])} devices and not added up")
        for index, tie in enumerate(self.costs.ties):
            if layer in tie.layers and self._apart(tie) and ("SumTied", index, 0) not in self.done:
                raise BrokenRule(f"layers {', '.join(map(str, tie.layers))} share parameters on several devices, not added up")
        self._once("Publish", layer, device)

    def _apart(self, tie: Tie) -> bool:
        """Whether some of the layers that share parameters are on devices that don't have the others."""
        holders = [self.holders.get(layer, set()) for layer in tie.layers]
        return any(other != holders[0] for other in holders)

    def _once(self, what: str, layer: int, chunk: int) -> None:
        if (what, layer, chunk) in self.done:
            raise BrokenRule(f"{what} of layer {layer}, chunk {chunk} is done a second time")
        self.done.add((what, layer, chunk))

    def _between(self, action: Send | Receive | Sum | SumTied) -> None:
        """An action that involves other devices."""
        if self.clock is None:
            raise BrokenRule("a plan for one device has nobody to talk to")
        if action.frees:
            raise BrokenRule("only a computation drops values: a transfer may still be on its way")
        match action:
            case Sum(layer=layer, size=size):
                self._sum(action.device, "Sum", layer, (layer,), size, self.clock)
            case SumTied(tie=tie):
                if not 0 <= tie < len(self.costs.ties):
                    raise BrokenRule(f"there is no tie {tie}")
                shared = self.costs.ties[tie]
                self._sum(action.device, "SumTied", tie, shared.layers, shared.gradient_bytes, self.clock)
            case Send(value=value, to=to):
                self._other(action.device, to)
                if value not in self.live[action.device]:
                    raise BrokenRule(f"sends {value}, which isn't live")
                self.clock.send(action.device, to, value, self.live[action.device][value])
            case Receive(value=value, source=source):
                self._other(action.device, source)
                size = value_size(self.costs, *value)
                self._run(action, 0, Rule((), ((*value, size),), (), 0, 0.0))
                self.clock.receive(action.device, source, value)

    def _other(self, device: int, other: int) -> None:
        """BrokenRule unless `other` is another device."""
        if not 0 <= other < len(self.shares) or other == device:
            raise BrokenRule(f"there is no other device {other}")

    def _sum(self, device: int, what: str, index: int, layers: tuple[int, ...], size: int, clock: Clock) -> None:
        """One device's part of a sum over all that hold gradients of `layers`."""
        holders = {holder for layer in layers for holder in self.holders.get(layer, ())}
        complete = all(self.adjoints_left.get(layer) == 0 for layer in layers)
        if not complete or device not in holders or device in self.summing:
            raise BrokenRule(f"layers {', '.join(map(str, layers))} have no complete gradients to add up here")
        self.summing.append(device)
        if len(self.summing) == len(holders):
            self._once(what, index, 0)
            clock.meet(tuple(sorted(holders)), size)
            self.summing = []

    def _tile(self, action: Action, layer: int, chunk: int, keep: bool) -> None:
        """Run an action on one tile."""
        device, kind = action.device, type(action)
        if not self.started[device]:
            raise BrokenRule("the plan has to start first")
        if not (0 <= layer <= self.costs.head and 0 <= chunk < self.costs.chunk_count):
            raise BrokenRule(f"there is no tile of layer {layer}, chunk {chunk}")
        if layer == self.costs.head and kind in (Forward, Adjoint):
            raise BrokenRule(f"{kind.__name__} is for the stem and the layers; the head has Loss and HeadVjp")
        if self.turned[device] == (kind in (Forward, Loss)):
            raise BrokenRule(f"{kind.__name__} belongs {'before' if self.turned[device] else 'after'} the turn")
        if keep and not self.costs.tile(layer, chunk).has_vjp:
            raise BrokenRule(f"layer {layer} has no VJP: nothing to keep internals for and nothing to run")
        if kind in (Forward, Loss):
            self._once("Forward", layer, chunk)
        elif kind in (Adjoint, HeadVjp):
            self._once("Adjoint", layer, chunk)
            self.adjoints_left[layer] -= 1
            self.holders.setdefault(layer, set()).add(device)
        key = (kind, layer, keep, chunk == self.costs.chunk_count - 1)
        if key not in self._rules:
            self._rules[key] = tile_rule(self.costs, kind, layer, chunk, keep)
        self._run(action, chunk, self._rules[key])

    def _run(self, action: Action, chunk: int, rule: Rule) -> None:
        """Check what `rule` reads, account for its peak, then write and free."""
        device = action.device
        live, held = self.live[device], self.held[device]
        reads = [Value(kind, layer, chunk + offset) for kind, layer, offset in rule.reads]
        for value in reads:
            if value not in live:
                raise BrokenRule(f"reads {value}, which isn't live")
        before, kinds = self.bytes[device], dict(held)
        writes = []
        for kind, layer, offset, size in rule.writes:
            value = Value(kind, layer, chunk + offset)
            if value in live:
                raise BrokenRule(f"writes {value}, which is live already")
            live[value] = size
            held[kind] += size
            self.bytes[device] += size
            writes.append(value)
        for value in action.frees:
            if value not in live:
                raise BrokenRule(f"frees {value}, which isn't live")
            size = live.pop(value)
            held[value.kind] -= size
            self.bytes[device] -= size
        for kind, layer, offset in rule.owns:
            if (kind, layer, chunk + offset) in live:
                raise BrokenRule(f"consumes {Value(kind, layer, chunk + offset)} but doesn't free it")
        self._account(device, kinds, max(rule.workspace, self.bytes[device] - before))
        self._time(action, reads, writes, rule.seconds)

    def _time(self, action: Action, reads: list[Value], writes: list[Value], seconds: float) -> None:
        """Let the clock run: on one device times add up, on several they depend on what arrives when."""
        if self.clock is None:
            self.seconds.append(seconds)
        elif not isinstance(action, Receive):
            try:
                self.clock.compute(action.device, reads, writes, action.frees, seconds / self.shares[action.device].speed)
            except WaitError as late:
                raise BrokenRule(f"{late}: a deadlock") from None

    def _account(self, device: int, held: dict[Kind, int], extra: int) -> None:
        """Compare the peak of an action with the budget; `held` are the bytes that were live when it started."""
        share = self.shares[device]
        peak = self.fixed[device] + sum(held.values()) + extra
        if peak > share.budget_bytes:
            over = peak - share.budget_bytes
            raise BrokenRule(f"needs {peak} bytes on {share.name}, {over} over its budget of {share.budget_bytes}")
        if peak > self.peak[device]:
            self.peak[device] = peak
            self.peak_kinds[device] = by_kind(share.resident_bytes, share.turn_bytes if self.turned[device] else {}, held, extra)
