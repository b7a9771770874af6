"""Lists of actions of several devices as one plan: an order that runs, and the time it takes.

The rules of time are those of `adjcomp.ir.transfers`. Of all devices' next actions the one that can start first comes next.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Wiring
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Value, value_bytes
from adjcomp.passes.simulate import Known

Place = tuple[int, Value]


class Timeline:
    """Merges the devices' lists."""

    def __init__(self, costs: StackCosts, wiring: Wiring, speeds: Sequence[float], lists: Sequence[Sequence[Action]]) -> None:
        self.costs, self.wiring, self.speeds, self.lists = costs, wiring, speeds, lists
        self.known = Known(costs)
        self.position = [0 for _ in lists]
        self.clock = [0.0 for _ in lists]
        self.there: dict[Place, float] = {}  # when a value is on a device
        self.gone: dict[Place, float] = {}  # when its last transfer away ends; infinite while the other side has no room
        self.rooms: dict[tuple[int, int, Value], float] = {}
        self.offers: dict[tuple[int, int, Value], float] = {}
        self.ways: dict[tuple[int, int], float] = {}
        self.waiting: dict[Place, list[int]] = {}  # devices that can't go on before something is known of a value
        self.meeting: dict[Sum | SumTied, list[int]] = {}  # a sum -> devices that have come to it
        self.members = Counter(_anywhere(a) for actions in lists for a in actions if isinstance(a, Sum | SumTied))
        self.order: list[Action] = []
        self.ready: list[tuple[float, int]] = [(0.0, device) for device in range(len(lists))]

    def run(self) -> tuple[tuple[Action, ...], float]:
        """The merged actions and the seconds until the last device is done.

        Raises:
            ValueError: the devices wait for each other in a circle.
        """
        while self.ready:
            _, device = heapq.heappop(self.ready)
            if self.position[device] < len(self.lists[device]):
                self._advance(device)
        stuck = [device for device, actions in enumerate(self.lists) if self.position[device] < len(actions)]
        if stuck:
            raise ValueError(f"devices {', '.join(map(str, stuck))} wait for each other in a circle")
        return tuple(self.order), max(self.clock)

    def _advance(self, device: int) -> None:
        """Run the next action of a device, or leave the device waiting."""
        action = self.lists[device][self.position[device]]
        if isinstance(action, Sum | SumTied):
            self._meet(action)
            return
        if isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Receive):
            self._receive(action)
        elif not self._compute(action):
            return
        self._done(device, action)

    def _done(self, device: int, action: Action) -> None:
        self.order.append(action)
        self.position[device] += 1
        heapq.heappush(self.ready, (self.clock[device], device))

    def _compute(self, action: Action) -> bool:
        """A computation; False where something that it needs isn't known yet."""
        device = action.device
        start = self.clock[device]
        for value in action.reads(self.costs):
            at = self.there.get((device, value))
            if at is None:
                self.waiting.setdefault((device, value), []).append(device)
                return False
            start = max(start, at)
        end = start + self.known.effect(action).seconds / self.speeds[device]
        for value in action.frees:
            away = self.gone.get((device, value), 0.0)
            if away == math.inf:
                self.waiting.setdefault((device, value), []).append(device)
                return False
            end = max(end, away)
        for value in action.frees:
            self.gone.pop((device, value), None)
            self.there.pop((device, value), None)
        for value in action.writes(self.costs):
            if value not in action.frees:
                self.there[device, value] = end
        self.clock[device] = end
        return True

    def _send(self, action: Send) -> None:
        key = (action.device, action.to, action.value)
        issued = max(self.clock[action.device], self.there[action.device, action.value])
        if key in self.rooms:
            self._move(key, max(issued, self.rooms.pop(key)))
        else:
            self.offers[key] = issued
            self.gone[action.device, action.value] = math.inf

    def _receive(self, action: Receive) -> None:
        key = (action.source, action.device, action.value)
        if key in self.offers:
            self.gone.pop((action.source, action.value), None)
            self._move(key, max(self.offers.pop(key), self.clock[action.device]))
        else:
            self.rooms[key] = self.clock[action.device]

    def _move(self, key: tuple[int, int, Value], start: float) -> None:
        """A transfer; wakes who waited for it."""
        source, target, value = key
        start = max(start, self.ways.get((source, target), 0.0))
        end = start + self.wiring.seconds(source, target, value_bytes(self.costs, value))
        self.ways[source, target] = end
        self.there[target, value] = end
        self.gone[source, value] = max(self.gone.get((source, value), 0.0), end)
        for place in ((target, value), (source, value)):
            for device in self.waiting.pop(place, ()):
                heapq.heappush(self.ready, (self.clock[device], device))

    def _meet(self, action: Sum | SumTied) -> None:
        """A sum over devices: the last that comes lets all go on."""
        key = _anywhere(action)
        come = self.meeting.setdefault(key, [])
        come.append(action.device)
        if len(come) < self.members[key]:
            return
        size = action.size if isinstance(action, Sum) else self.costs.ties[action.tie].gradient_bytes
        end = max(self.clock[device] for device in come) + self.wiring.sum_seconds(tuple(sorted(come)), size)
        for device in sorted(come):
            self.clock[device] = end
            self._done(device, self.lists[device][self.position[device]])
        del self.meeting[key]


def _anywhere(action: Sum | SumTied) -> Sum | SumTied:
    """A sum without the device that takes part."""
    return replace(action, device=0)
