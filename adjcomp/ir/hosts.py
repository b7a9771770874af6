"""The verifier's host memory: what was offloaded from each device and hasn't come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adjcomp.ir.plan import HostTier
from adjcomp.ir.rules import BrokenRule
from adjcomp.ir.values import Value


class HostMemory:
    """Pinned host memory of all devices. Lists are by device; bytes count while a copy in either direction is under way."""

    def __init__(self, tiers: Sequence[HostTier | None]) -> None:
        self.tiers = tuple(tiers)
        self.held: list[dict[Value, int]] = [{} for _ in tiers]
        self.returning: list[set[Value]] = [set() for _ in tiers]  # fetched, and not read since
        self.lent: list[set[Value]] = [set() for _ in tiers]  # loaded, and not read since
        self.bytes = [0 for _ in tiers]
        self.peak = [0 for _ in tiers]

    @property
    def exists(self) -> bool:
        """Whether any device has a host tier."""
        return any(tier is not None for tier in self.tiers)

    def take(self, device: int, value: Value, size: int) -> None:
        """An Offload of `size` bytes."""
        tier = self.tiers[device]
        if tier is None:
            raise BrokenRule(f"offloads {value}, but device {device} has no host tier")
        if value in self.held[device]:
            raise BrokenRule(f"offloads {value}, which is on the host already")
        self.held[device][value] = size
        self.bytes[device] += size
        if self.bytes[device] > tier.budget_bytes:
            over = self.bytes[device] - tier.budget_bytes
            raise BrokenRule(f"needs {self.bytes[device]} bytes on the host, {over} over its budget of {tier.budget_bytes}")
        self.peak[device] = max(self.peak[device], self.bytes[device])

    def give(self, device: int, value: Value) -> int:
        """A Fetch: the bytes of the value that comes back."""
        if value not in self.held[device] or value in self.returning[device]:
            raise BrokenRule(f"fetches {value}, which isn't on the host")
        self.returning[device].add(value)
        return self.held[device][value]

    def lend(self, device: int, value: Value) -> int:
        """A Load: the bytes of the value of which a copy comes."""
        if value not in self.held[device] or value in self.returning[device]:
            raise BrokenRule(f"loads {value}, which isn't on the host")
        self.lent[device].add(value)
        return self.held[device][value]

    def arrived(self, device: int, read: Iterable[Value], dropped: Iterable[Value]) -> None:
        """A computation has read some values and dropped some: those that were fetched and read have left the host."""
        if not self.returning[device] and not self.lent[device]:
            return
        for value in read:
            self.lent[device].discard(value)
            if value in self.returning[device]:
                self.returning[device].discard(value)
                self.bytes[device] -= self.held[device].pop(value)
        for value in dropped:
            if value in self.returning[device] or value in self.lent[device]:
                raise BrokenRule(f"drops {value}, which is being fetched and was never read")

    def finish(self) -> None:
        """BrokenRule where something is left on a host."""
        for device, held in enumerate(self.held):
            if held:
                names = ", ".join(str(value) for value in list(held)[:5])
                raise BrokenRule(f"{len(held)} values stay on the host of device {device} and are never fetched: {names}")
