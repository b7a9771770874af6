"""Lists of actions of several devices as one plan: an order that runs, and the time it takes.

The rules of time are those of `adjcomp.ir.transfers`. Of all devices' next actions the one that can start first comes next.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adjcomp.ir.actions import Action, Publish
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.plan import Wiring
from adjcomp.ir.transfers import Receive, Send, Sum, SumTied
from adjcomp.ir.values import Kind, Value
from adjcomp.passes.recipes import Recipes

Raw = tuple[Kind, int, int]  # a value


class Timeline:
    """Merges the devices' lists.

    What a device makes itself is there when its next computation starts, so only values from and to other devices are looked at.
    """

    def __init__(self, costs: StackCosts, wiring: Wiring, speeds: Sequence[float], lists: Sequence[Sequence[Action]]) -> None:
        self.costs, self.wiring, self.speeds, self.lists = costs, wiring, speeds, lists
        self.recipes = Recipes(costs)
        self.position = [0 for _ in lists]
        self.clock = [0.0 for _ in lists]
        self.coming: list[set[Raw]] = [{a.value for a in actions if type(a) is Receive} for actions in lists]
        self.places = [{(kind, layer) for kind, layer, _ in values} for values in self.coming]  # of those that come
        self.there: list[dict[Raw, float]] = [{} for _ in lists]  # when a value from another device is here
        self.gone: list[dict[Raw, float]] = [{} for _ in lists]  # when its last transfer away ends; infinite without room there
        self.rooms: dict[tuple[int, int, Raw], float] = {}
        self.offers: dict[tuple[int, int, Raw], float] = {}
        self.ways: dict[tuple[int, int], float] = {}
        self.waiting: dict[tuple[int, Raw], list[int]] = {}  # devices that can't go on before something is known of a value
        self.meeting: dict[Sum | SumTied, dict[int, float]] = {}  # a sum -> devices that have come to it, and when
        self.pending = [0 for _ in lists]  # sums that a device has come to and that haven't begun
        self.summed = [0.0 for _ in lists]  # when the last sum of a device ends
        self.handing: set[int] = set()  # devices that wait for sums, to hand gradients out
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
            while self.position[device] < len(self.lists[device]) and self._advance(device):
                if self.ready and (self.clock[device], device) > self.ready[0]:
                    heapq.heappush(self.ready, (self.clock[device], device))
                    break
        stuck = [device for device, actions in enumerate(self.lists) if self.position[device] < len(actions)]
        if stuck:
            raise ValueError(f"devices {', '.join(map(str, stuck))} wait for each other in a circle")
        return tuple(self.order), max(self.clock)

    def _advance(self, device: int) -> bool:
        """Run the next action of a device; False where it has to wait."""
        action = self.lists[device][self.position[device]]
        kind = type(action)
        if kind is Send:
            self._send(action)  # type: ignore[arg-type]
        elif kind is Receive:
            self._receive(action)  # type: ignore[arg-type]
        elif isinstance(action, Sum | SumTied):
            self._meet(action)
        elif not self._compute(device, action):
            return False
        self._done(device, action)
        return True

    def _done(self, device: int, action: Action) -> None:
        self.order.append(action)
        self.position[device] += 1

    def _compute(self, device: int, action: Action) -> bool:
        """A computation; False where something that it needs isn't known yet."""
        recipe, chunk = self.recipes.of(action)
        start, places, there, gone = self.clock[device], self.places[device], self.there[device], self.gone[device]
        if type(action) is Publish:
            if self.pending[device]:
                self.handing.add(device)
                return False
            start = max(start, self.summed[device])
        for kind, layer, offset in recipe.reads:
            if (kind, layer) in places and (value := (kind, layer, chunk + offset)) in self.coming[device]:
                at = there.get(value)
                if at is None:
                    self.waiting.setdefault((device, value), []).append(device)
                    return False
                start = max(start, at)
        end = start + recipe.seconds / self.speeds[device]
        if gone:
            for value in action.frees:
                away = gone.get(value, 0.0)
                if away == math.inf:
                    self.waiting.setdefault((device, value), []).append(device)
                    return False
                end = max(end, away)
        for value in action.frees:
            gone.pop(value, None)
            there.pop(value, None)
        self.clock[device] = end
        return True

    def _send(self, action: Send) -> None:
        key = (action.device, action.to, action.value)
        issued = max(self.clock[action.device], self.there[action.device].get(action.value, 0.0))
        if key in self.rooms:
            self._move(key, max(issued, self.rooms.pop(key)))
        else:
            self.offers[key] = issued
            self.gone[action.device][action.value] = math.inf

    def _receive(self, action: Receive) -> None:
        key = (action.source, action.device, action.value)
        if key in self.offers:
            self.gone[action.source].pop(action.value, None)
            self._move(key, max(self.offers.pop(key), self.clock[action.device]))
        else:
            self.rooms[key] = self.clock[action.device]

    def _move(self, key: tuple[int, int, Value], start: float) -> None:
        """A transfer; wakes who waited for it."""
        source, target, value = key
        start = max(start, self.ways.get((source, target), 0.0))
        end = start + self.wiring.seconds(source, target, self.recipes.size(value))
        self.ways[source, target] = end
        self.there[target][value] = end
        self.gone[source][value] = max(self.gone[source].get(value, 0.0), end)
        for place in ((target, value), (source, value)):
            for device in self.waiting.pop(place, ()):
                heapq.heappush(self.ready, (self.clock[device], device))

    def _meet(self, action: Sum | SumTied) -> None:
        """A device comes to a sum over devices; the last one begins it, and wakes who waited for that."""
        key = _anywhere(action)
        come = self.meeting.setdefault(key, {})
        come[action.device] = self.clock[action.device]
        self.pending[action.device] += 1
        if len(come) < self.members[key]:
            return
        devices = tuple(sorted(come))
        size = action.size if isinstance(action, Sum) else self.costs.ties[action.tie].gradient_bytes
        start = max(*come.values(), *(self.summed[device] for device in devices))
        end = start + self.wiring.sum_seconds(devices, size)
        for device in devices:
            self.summed[device] = end
            self.pending[device] -= 1
            if device in self.handing and not self.pending[device]:
                self.handing.discard(device)
                heapq.heappush(self.ready, (self.clock[device], device))
        del self.meeting[key]


def _anywhere(action: Sum | SumTied) -> Sum | SumTied:
    """A sum without the device that takes part."""
    return replace(action, device=0)
