"""Gradients on their way: sums over devices that have begun, and who has come to them."""

from __future__ import annotations

from adjcomp.ir.clock import Clock
from adjcomp.ir.rules import BrokenRule

Subject = tuple[str, int]  # "Sum" and a layer, or "SumTied" and a tie


class Sums:
    """Every device comes to a sum when its own part of the gradients is complete; the last one that comes begins it."""

    def __init__(self) -> None:
        self.come: dict[Subject, dict[int, float]] = {}  # sums that wait for devices -> those that have come, and when
        self._closed: set[tuple[int, int]] = set()  # (device, layer) whose gradients take nothing more

    def join(self, device: int, subject: Subject, layers: tuple[int, ...], time: float) -> dict[int, float]:
        """A device comes; the devices that have, and when each did."""
        come = self.come.setdefault(subject, {})
        if device in come:
            raise BrokenRule(f"device {device} takes part in a sum a second time")
        come[device] = time
        self._closed.update((device, layer) for layer in layers)
        return come

    def begin(self, subject: Subject, size: int, clock: Clock) -> None:
        """All have come."""
        clock.meet(self.come.pop(subject), size)

    def check_open(self, device: int, layer: int) -> None:
        """Something adds to the gradients of a layer."""
        if (device, layer) in self._closed:
            raise BrokenRule(f"adds to gradients of layer {layer} that are being added up over devices")

    def check_here(self, device: int) -> None:
        """A device hands gradients out."""
        if any(device in come for come in self.come.values()):
            raise BrokenRule("hands gradients out while a sum waits for other devices")

    def check_none(self) -> None:
        """The end of the plan."""
        if self.come:
            raise BrokenRule("a sum waits for other devices")
