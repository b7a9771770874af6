"""The verifier's clock: when each action of a plan with transfers runs, by the rules in `adjcomp.ir.transfers`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from adjcomp.ir.plan import HostTier, Wiring
from adjcomp.ir.values import Value


class WaitError(Exception):
    """A computation waits for something that comes after it in the plan."""


@dataclass
class Clock:
    """Times in seconds. `arrival[d, v]` is when value v is there on device d: the end of its maker or of its transfer."""

    wiring: Wiring | None  # None: there is one device
    hosts: tuple[HostTier | None, ...]  # by device
    free: list[float]  # when the computation before ended, by device
    arrival: dict[tuple[int, Value], float] = field(default_factory=dict)
    leaving: dict[tuple[int, Value], float] = field(default_factory=dict)  # when the last transfer of a value away ends
    posted: dict[tuple[int, int, Value], float] = field(default_factory=dict)  # (source, target, value): room without a Send
    offered: dict[tuple[int, int, Value], tuple[float, int]] = field(default_factory=dict)  # a Send without room, and its bytes
    way: dict[tuple[int, int], float] = field(default_factory=dict)  # when the way from one device to another is free
    summed: dict[int, float] = field(default_factory=dict)  # when the last sum of a device ends
    stored: dict[tuple[int, Value], float] = field(default_factory=dict)  # when an offloaded value has reached the host
    host_way: dict[tuple[int, bool], float] = field(default_factory=dict)  # (device, towards the host): when that way is free
    copied: tuple[float, float] = (0.0, 0.0)  # begin and end of the last transfer between a device and its host

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

    def meet(self, come: dict[int, float], size: int) -> None:
        """A sum over the devices that have `come`, each at its time."""
        devices = tuple(sorted(come))
        start = max(*come.values(), *(self.summed.get(device, 0.0) for device in devices))
        self.summed.update(dict.fromkeys(devices, start + self._links().sum_seconds(devices, size)))

    def await_sums(self, device: int) -> None:
        """What comes next on a device starts when the sums that it has come to have ended."""
        self.free[device] = max(self.free[device], self.summed.get(device, 0.0))

    def offload(self, device: int, value: Value, size: int) -> None:
        """An Offload is issued."""
        if (device, value) not in self.arrival:
            raise WaitError(f"offloads {value}, which hasn't arrived")
        end = self._copy(device, True, max(self.free[device], self.arrival[device, value]), size)
        self.stored[device, value] = end
        self.leaving[device, value] = max(self.leaving.get((device, value), 0.0), end)

    def fetch(self, device: int, value: Value, size: int) -> None:
        """A Fetch is issued; the value is on the host or on its way there."""
        ready = max(self.free[device], self.stored.pop((device, value)))
        self.arrival[device, value] = self._copy(device, False, ready, size)

    def load(self, device: int, value: Value, size: int) -> None:
        """A Load is issued; the value stays on the host."""
        ready = max(self.free[device], self.stored[device, value])
        self.arrival[device, value] = self._copy(device, False, ready, size)

    def _copy(self, device: int, out: bool, ready: float, size: int) -> float:
        """A transfer between a device and its host, when it ends."""
        host = self.hosts[device]
        if host is None:
            raise WaitError(f"device {device} has no host tier")
        start = max(ready, self.host_way.get((device, out), 0.0))
        self.copied = (start, start + host.seconds(size))
        self.host_way[device, out] = self.copied[1]
        return self.copied[1]

    def _links(self) -> Wiring:
        if self.wiring is None:
            raise WaitError("a single device has no links")
        return self.wiring

    def _move(self, key: tuple[int, int, Value], ready: float, size: int) -> None:
        """A transfer whose two sides are issued at `ready`."""
        source, target, value = key
        end = max(ready, self.way.get((source, target), 0.0)) + self._links().seconds(source, target, size)
        self.way[source, target] = end
        self.arrival[target, value] = end
        self.leaving[source, value] = max(self.leaving.get((source, value), 0.0), end)
