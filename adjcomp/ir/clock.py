"""The verifier's clock: when each action of a plan on several devices runs, by the rules in `adjcomp.ir.transfers`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from adjcomp.ir.plan import Wiring
from adjcomp.ir.values import Value


class WaitError(Exception):
    """A computation waits for something that comes after it in the plan."""


@dataclass
class Clock:
    """Times in seconds. `arrival[d, v]` is when value v is there on device d: the end of its maker or of its transfer."""

    wiring: Wiring
    free: list[float]  # when the computation before ended, by device
    arrival: dict[tuple[int, Value], float] = field(default_factory=dict)
    leaving: dict[tuple[int, Value], float] = field(default_factory=dict)  # when the last transfer of a value away ends
    posted: dict[tuple[int, int, Value], float] = field(default_factory=dict)  # (source, target, value): room without a Send
    offered: dict[tuple[int, int, Value], tuple[float, int]] = field(default_factory=dict)  # a Send without room, and its bytes
    way: dict[tuple[int, int], float] = field(default_factory=dict)  # when the way from one device to another is free

    def compute(self, device: int, reads: list[Value], writes: list[Value], frees: tuple[Value, ...], seconds: float) -> None:
        """A computation."""
        start = self.free[device]
        for value in reads:
            if (device, value) not in self.arrival:
                raise WaitError(f"waits for {value}, which no device sends before")
            start = max(start, self.arrival[device, value])
        end = start + seconds
        for value in frees:
            end = max(end, self.leaving.pop((device, value), 0.0))
            if end == math.inf:
                raise WaitError(f"drops {value} before the other device has room for it")
            self.arrival.pop((device, value), None)
        for value in writes:
            self.arrival[device, value] = end
        self.free[device] = end

    def send(self, device: int, target: int, value: Value, size: int) -> None:
        """A Send is issued."""
        if (device, value) not in self.arrival:
            raise WaitError(f"sends {value} on, which hasn't arrived")
        issued = max(self.free[device], self.arrival[device, value])
        key = (device, target, value)
        if key in self.posted:
            self._move(key, max(issued, self.posted.pop(key)), size)
        else:
            self.offered[key] = (issued, size)
            self.leaving[device, value] = math.inf

    def receive(self, device: int, source: int, value: Value) -> None:
        """A Receive is issued."""
        key = (source, device, value)
        if key in self.offered:
            issued, size = self.offered.pop(key)
            self.leaving.pop((source, value), None)
            self._move(key, max(issued, self.free[device]), size)
        else:
            self.posted[key] = self.free[device]

    def meet(self, devices: tuple[int, ...], size: int) -> None:
        """A Sum over `devices`."""
        end = max(self.free[device] for device in devices) + self.wiring.sum_seconds(devices, size)
        for device in devices:
            self.free[device] = end

    def _move(self, key: tuple[int, int, Value], ready: float, size: int) -> None:
        """A transfer whose two sides are issued at `ready`."""
        source, target, value = key
        end = max(ready, self.way.get((source, target), 0.0)) + self.wiring.seconds(source, target, size)
        self.way[source, target] = end
        self.arrival[target, value] = end
        self.leaving[source, value] = max(self.leaving.get((source, value), 0.0), end)
