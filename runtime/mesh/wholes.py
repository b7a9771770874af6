"""Parameters that ranks have in parts, whole around the layers at work.

All ranks gather layer after layer in one order (`adjcomp.runtime.mesh.passes`). Under a placement by time they aren't at the same
layer: a range is ahead of the next one by a layer, so the first of R ranks is up to R - 1 passes ahead of the last, in the
backward it is behind. So each rank begins a gather R - 1 passes before it needs it: then nobody waits for a rank behind it, and
holds R layers at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch

from adjcomp.ir.actions import Action
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.link import Circle, Link
from adjcomp.runtime.mesh.passes import Layers, layer_of
from adjcomp.runtime.mesh.sharded import Sharding, local_part
from adjcomp.runtime.mesh.waiting import Ticket

Tensor = torch.Tensor


def reach(ranks: int) -> int:
    """How many passes ahead a rank begins to gather."""
    return max(1, ranks - 1)


def most_gathered(layers: Iterable[Mapping[str, int]], ranks: int) -> int:
    """Most bytes of wholes at a time. layers: by layer, bytes of its sharded parameters by name."""
    sizes = [dict(layer) for layer in layers]
    largest = sorted((sum(layer.values()) for layer in sizes), reverse=True)[: reach(ranks) + 1]
    everything: dict[str, int] = {}
    for layer in sizes:
        everything.update(layer)
    return min(sum(largest), sum(everything.values()))


def circle_of(sharding: Sharding) -> Circle:
    """The ranks that have the parts."""
    return Circle(f"parts {sharding.ranks} {sharding.dimension}", sharding.ranks, sharding.group, sharding.group)


class Wholes:
    """One step's wholes on one rank.

    passes: before the Turn and after it. names: by layer, its sharded parameters. known: parameters and buffers as the model has
        them. state: as tiles read them: wholes that are here, else stand-ins without memory.
    """

    def __init__(
        self,
        link: Link,
        tracker: StorageTracker,
        passes: tuple[Layers, Layers],
        names: Sequence[tuple[str, ...]],
        shardings: Mapping[str, Sharding],
        known: Mapping[str, Tensor],
    ) -> None:
        self.link, self.tracker, self.shardings, self.parts = link, tracker, shardings, known
        self.passes, self.turn, self.names = (*passes[0], *passes[1]), len(passes[0]), names
        self.reach = reach(len(link.circle.ranks))
        self.state = {name: self._absent(name) if name in shardings else tensor for name, tensor in known.items()}
        self.caches: list[MutableMapping[str, Tensor]] = []  # of others, from which a whole goes when it goes here
        self._at, self._begun = -1, 0
        self._tickets: dict[str, Ticket] = {}

    def before(self, action: Action, head: int) -> None:
        """Gather what an action reads, and let go of what no pass nearby reads."""
        layer = layer_of(action, head)
        if layer is not None and (self._at < 0 or self.passes[self._at] != layer):
            self._go(self.passes.index(layer, self._at + 1))

    def finish_forward(self) -> None:
        """Take part in what is left before the Turn: a rank without work does nothing else."""
        self._go(self.turn - 1)

    def finish(self) -> None:
        """Take part in all that is left, and let everything go."""
        self._go(len(self.passes) - 1)
        self._keep_only(frozenset())

    def _go(self, at: int) -> None:
        """Come to pass `at`, by way of all those before it."""
        while self._at < at:
            self._at += 1
            near = self.passes[self._at : self._at + self.reach + 1]
            self._keep_only(frozenset(name for layer in near for name in self.names[layer]))
            while self._begun < self._at + len(near):
                self._begin(self.passes[self._begun])
                self._begun += 1
            for name in self.names[self.passes[self._at]]:
                self.link.wait(self._tickets[name])

    def _begin(self, layer: int) -> None:
        """Begin to gather what isn't here of a layer."""
        for name in self.names[layer]:
            if name not in self._tickets:
                sharding, own = self.shardings[name], local_part(self.parts[name])
                room = sharding.room(own.dtype, own.device)
                self.tracker.track(room)
                pair, what = (room, sharding.padded(own)), f"the parts of {name}"
                self._tickets[name] = self.link.gather([pair], circle_of(sharding), what, ahead=True)
                self.state[name] = room[: sharding.shape[0]]

    def _keep_only(self, names: frozenset[str]) -> None:
        for name in [name for name in self._tickets if name not in names]:
            del self._tickets[name]
            self.state[name] = self._absent(name)
            for cache in self.caches:
                cache.pop(name, None)

    def _absent(self, name: str) -> Tensor:
        """A stand-in, for its shape and type."""
        return torch.empty(self.shardings[name].shape, dtype=self.parts[name].dtype, device="meta")
