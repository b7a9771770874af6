"""The abstract machine of the verifier: memory of every device, and the clock."""

from __future__ import annotations

from adjcomp.ir.accumulators import Accumulators
from adjcomp.ir.actions import Action, Adjoint, Advance, Forward, Free, HeadVjp, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.borders import BEFORE_TURN, Borders
from adjcomp.ir.clock import Clock, WaitError
from adjcomp.ir.forks import Fork, Join
from adjcomp.ir.hosts import HostMemory
from adjcomp.ir.kinds import by_kind
from adjcomp.ir.ledger import Ledger
from adjcomp.ir.narrow import Narrow, Widen
from adjcomp.ir.plan import Plan
from adjcomp.ir.rules import BrokenRule, Rule, initial_rule, narrow_rule, tile_rule, value_size
from adjcomp.ir.section import RaceError, Section
from adjcomp.ir.summaries import RangeAction, TailVjp
from adjcomp.ir.sums import Sums
from adjcomp.ir.transfers import Fetch, Load, Offload, Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value


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
        self.ledger = Ledger(plan.costs, len(plan.shares))
        self.borders = Borders(plan.costs)
        self.sums = Sums()
        self.gradients = [Accumulators(plan.costs, share, alone=len(plan.shares) == 1) for share in plan.shares]
        self.host = HostMemory([share.host for share in plan.shares])
        timed = plan.wiring is not None or self.host.exists
        self.clock = Clock(plan.wiring, self.host.tiers, [0.0 for _ in devices]) if timed else None
        self.section: Section | None = None  # between a Fork and its Join
        self._rules: dict[tuple[type[Action], int, bool, bool], Rule] = {}

    def step(self, action: Action) -> None:
        """Run one action."""
        if not 0 <= action.device < len(self.shares):
            raise BrokenRule(f"there is no device {action.device}")
        if self.section is not None and not isinstance(action, Recompute | Adjoint | HeadVjp | Join):
            raise BrokenRule(f"{type(action).__name__} can't run beside other streams")
        match action:
            case Start(first=first, last=last):
                self.ledger.start(action.device, first, last)
                self._run(action, 0, initial_rule(self.costs, Kind.CARRY, first, last, -1))
            case Turn(first=first, last=last):
                self.ledger.turn(action.device, first, last)
                self.gradients[action.device].check()
                self.fixed[action.device] += sum(self.gradients[action.device].turn.values())
                self._run(action, 0, initial_rule(self.costs, Kind.ADJOINT, first, last, self.costs.chunk_count - 1))
            case RangeAction():
                self._range(action)
            case Publish(layer=layer):
                self._publish(action.device, layer)
                self._run(action, 0, Rule((), (), (), self.costs.publish_bytes[layer], 0.0))
                self.fixed[action.device] += self.gradients[action.device].published(layer)
            case Forward(layer=layer, chunk=chunk, keep=keep) | Recompute(layer=layer, chunk=chunk, keep=keep):
                self._tile(action, layer, chunk, keep)
            case Loss(chunk=chunk, keep=keep):
                self._tile(action, self.costs.head, chunk, keep)
            case Advance(layer=layer, chunk=chunk):
                self._tile(action, layer, chunk, False)
            case Adjoint(layer=layer, chunk=chunk):
                self._vjp(action, layer, chunk)
            case HeadVjp(chunk=chunk):
                self._vjp(action, self.costs.head, chunk)
            case Narrow(layer=layer, chunk=chunk) | Widen(layer=layer, chunk=chunk):
                self.ledger.border(action.device, layer, chunk)
                self._run(action, chunk, narrow_rule(self.costs, layer, chunk, wider=isinstance(action, Widen)))
            case Free():
                self._run(action, 0, Rule((), (), (), 0, 0.0))
            case Fork():
                self._fork(action)
            case Join():
                self._join(action)
            case Send() | Receive() | Sum() | SumTied() | Offload() | Fetch() | Load():
                try:
                    self._transfer(action)
                except WaitError as late:
                    raise BrokenRule(f"{late}: a deadlock") from None
            case _:
                raise BrokenRule(f"no rule for {type(action).__name__}")

    def finish(self) -> None:
        """Check that all work is done and nothing is left."""
        self.sums.check_none()
        if self.section is not None:
            raise BrokenRule("a Fork has no Join")
        self.ledger.finish()
        if self.clock is not None and (self.clock.posted or self.clock.offered):
            source, target, value = next(iter({**self.clock.posted, **self.clock.offered}))
            raise BrokenRule(f"{value} from device {source} to device {target} has only one side: the other waits for ever")
        self.host.finish()
        for device, live in enumerate(self.live):
            if live:
                names = ", ".join(str(value) for value in list(live)[:5])
                raise BrokenRule(f"{len(live)} values are never freed on device {device}: {names}")

    def _range(self, action: RangeAction) -> None:
        """An action on a border between ranges, or on a chunk of a range that is summarized."""
        self.ledger.half(action.device, forward=isinstance(action, BEFORE_TURN), what=type(action).__name__)
        if isinstance(action, TailVjp):
            self.sums.check_open(action.device, action.layer)
            self.ledger.adds(action.device, action.layer)
        self._run(action, action.chunk, self.borders.rule(action))

    def _vjp(self, action: Action, layer: int, chunk: int) -> None:
        """The VJP of a tile."""
        self.sums.check_open(action.device, layer)
        self.borders.check_cotangent(layer, chunk)
        self.fixed[action.device] += self.gradients[action.device].reversed(layer)
        self._tile(action, layer, chunk, True)
        self.borders.made(action.device, layer, chunk)

    def _fork(self, action: Fork) -> None:
        if len(self.shares) > 1 or action.frees:
            raise BrokenRule("a Fork is for plans of one device, and drops nothing")
        self.section = Section(self.costs, self.live[0])

    def _join(self, action: Join) -> None:
        """The streams meet: from here on what is live counts as ever."""
        if self.section is None:
            raise BrokenRule("a Join without a Fork")
        self.section = None
        self.bytes[0], self.held[0] = sum(self.live[0].values()), dict.fromkeys(Kind, 0)
        for value, size in self.live[0].items():
            self.held[0][value.kind] += size
        self._run(action, 0, Rule((), (), (), 0, 0.0))

    def _transfer(self, action: Send | Receive | Sum | SumTied | Offload | Fetch | Load) -> None:
        """An action that involves other devices or the host."""
        if action.frees:
            raise BrokenRule("only a computation drops values: a transfer may still be on its way")
        if isinstance(action, Offload | Fetch | Load):
            self._spill(action)
        elif self.clock is None or len(self.shares) == 1:
            raise BrokenRule("a plan for one device has nobody to talk to")
        else:
            self._between(action, self.clock)

    def _spill(self, action: Offload | Fetch | Load) -> None:
        """An action between a device and its host."""
        device, value = action.device, action.value
        if self.section is not None:
            raise BrokenRule("copies to the host and back start outside of a Fork and its Join")
        if self.clock is None:
            raise BrokenRule(f"{type(action).__name__} of {value}, but device {device} has no host tier")
        if isinstance(action, Offload):
            if value not in self.live[device]:
                raise BrokenRule(f"offloads {value}, which isn't live")
            self.host.take(device, value, self.live[device][value])
            self.clock.offload(device, value, self.live[device][value])
            return
        fetched = isinstance(action, Fetch)
        size = self.host.give(device, value) if fetched else self.host.lend(device, value)
        self._run(action, 0, Rule((), ((*value, size),), (), 0, 0.0))
        (self.clock.fetch if fetched else self.clock.load)(device, value, size)

    def _between(self, action: Send | Receive | Sum | SumTied, clock: Clock) -> None:
        """An action that involves other devices."""
        match action:
            case Sum(layer=layer, size=size):
                self._sum(action.device, ("Sum", layer), (layer,), size, clock)
            case SumTied(tie=tie):
                if not 0 <= tie < len(self.costs.ties):
                    raise BrokenRule(f"there is no tie {tie}")
                shared = self.costs.ties[tie]
                self._sum(action.device, ("SumTied", tie), shared.layers, shared.gradient_bytes, clock)
            case Send(value=value, to=to):
                self._other(action.device, to)
                if value not in self.live[action.device]:
                    raise BrokenRule(f"sends {value}, which isn't live")
                clock.send(action.device, to, value, self.live[action.device][value])
            case Receive(value=value, source=source):
                self._other(action.device, source)
                size = value_size(self.costs, *value)
                self.borders.received(action.device, value)
                self._run(action, 0, Rule((), ((*value, size),), (), 0, 0.0))
                clock.receive(action.device, source, value)

    def _other(self, device: int, other: int) -> None:
        """BrokenRule unless `other` is another device."""
        if not 0 <= other < len(self.shares) or other == device:
            raise BrokenRule(f"there is no other device {other}")

    def _sum(self, device: int, subject: tuple[str, int], layers: tuple[int, ...], size: int, clock: Clock) -> None:
        """One device's part of a sum over all that hold gradients of `layers`."""
        if not any(device in self.ledger.holders.get(layer, ()) for layer in layers):
            raise BrokenRule(f"device {device} has no gradients of layers {', '.join(map(str, layers))} to add up")
        come = self.sums.join(device, subject, layers, clock.free[device])
        if come.keys() == self.ledger.complete(layers):
            self.borders.check_complete(layers)
            self.ledger.once(*subject, 0)
            self.sums.begin(subject, size, clock)

    def _publish(self, device: int, layer: int) -> None:
        """The gradients of a layer are handed out."""
        self.borders.check_complete((layer,))
        self.ledger.publish(device, layer)
        if self.clock is not None:
            self.sums.check_here(device)
            self.clock.await_sums(device)

    def _tile(self, action: Action, layer: int, chunk: int, keep: bool) -> None:
        """Run an action on one tile."""
        if self.section is None and action.stream != 0:
            raise BrokenRule(f"stream {action.stream} runs outside of a Fork and its Join")
        kind = type(action)
        self.ledger.tile(kind, action.device, layer, chunk, keep)
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
        if self.section is not None:
            self._beside(action, chunk, rule, reads, self.section)
            return
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

    def _beside(self, action: Action, chunk: int, rule: Rule, reads: list[Value], section: Section) -> None:
        """The same beside other streams: what was live at the Fork counts until the Join."""
        live = self.live[0]
        writes = [(Value(kind, layer, chunk + offset), size) for kind, layer, offset, size in rule.writes]
        owns = [Value(kind, layer, chunk + offset) for kind, layer, offset in rule.owns]
        for value, size in writes:
            if value in live:
                raise BrokenRule(f"writes {value}, which is live already")
            live[value] = size
        for value in action.frees:
            if live.pop(value, None) is None:
                raise BrokenRule(f"frees {value}, which isn't live")
        for value in owns:
            if value in live:
                raise BrokenRule(f"consumes {value} but doesn't free it")
        try:
            if isinstance(action, Adjoint | HeadVjp):
                section.claim(action.stream, self.costs.head if isinstance(action, HeadVjp) else action.layer)
            section.run(action.stream, reads, writes, action.frees, owns, rule.workspace)
        except RaceError as race:
            raise BrokenRule(str(race)) from None
        self._account(0, self.held[0], section.extra_bytes)
        self._time(action, reads, [value for value, _ in writes], rule.seconds)

    def _time(self, action: Action, reads: list[Value], writes: list[Value], seconds: float) -> None:
        """Let the clock run: on one device times add up, on several they depend on what arrives when."""
        if self.clock is None:
            self.seconds.append(seconds)
        elif not isinstance(action, Receive | Fetch | Load):
            try:
                self.clock.compute(action.device, reads, writes, action.frees, seconds / self.shares[action.device].speed)
            except WaitError as late:
                raise BrokenRule(f"{late}: a deadlock") from None
            self.host.arrived(action.device, reads, action.frees)

    def _account(self, device: int, held: dict[Kind, int], extra: int) -> None:
        """Compare the peak of an action with the budget; `held` are the bytes that were live when it started."""
        share = self.shares[device]
        peak = self.fixed[device] + sum(held.values()) + extra
        if peak > share.budget_bytes:
            over = peak - share.budget_bytes
            raise BrokenRule(f"needs {peak} bytes on {share.name}, {over} over its budget of {share.budget_bytes}")
        if peak > self.peak[device]:
            self.peak[device] = peak
            turn = self.gradients[device].turn if self.ledger.turned[device] else {}
            self.peak_kinds[device] = by_kind(share.resident_bytes, turn, held, extra)
