"""What lives beside the tiles, by layer: which bytes a device holds that has some of the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

GRADIENTS = "gradients"  # the kind of gradient accumulators
KEYS = "keys and values"  # of attention layers, over the whole sequence
KEYS_SENT = "cotangents of keys and values"


@dataclass(frozen=True)
class Item:
    """A tensor, or several of one kind, that is live because a layer is on the device."""

    name: str  # of the parameter, buffer or input; a name that several layers share (tied embeddings) counts once a device
    kind: str  # "parameters", "optimizer", "gradients", …
    size: int  # bytes
    from_turn: bool  # live from the Turn on (gradient accumulators) rather than during the whole step


@dataclass(frozen=True)
class Residency:
    """Items by layer: stem first, head last."""

    layers: tuple[tuple[Item, ...], ...]

    def on(self, first: int, last: int) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by kind of a device with layers `first` … `last`: live during the whole step, and from the Turn on."""
        items = {(item.name, item.kind): item for layer in self.layers[first : last + 1] for item in layer}.values()
        return by_kind(item for item in items if not item.from_turn), by_kind(item for item in items if item.from_turn)

    def idle(self, *, replicated: bool) -> dict[str, int]:
        """Bytes by kind of a device without work: where all layers are on every device, those and their gradients, which it takes
        in from the others; else what is on every device.
        """
        if not replicated:
            shared = set(self.layers[0]).intersection(*self.layers[1:])
            return by_kind(item for item in self.layers[0] if item in shared)
        resident, turn = self.on(0, len(self.layers) - 1)
        return {kind: resident.get(kind, 0) + turn.get(kind, 0) for kind in {**resident, **turn}}

    def gradients(self, layer: int, own: range) -> int:
        """Bytes of the gradient accumulators that are added up with `layer` over devices that all have the layers `own`.

        A parameter that several layers share counts with the lowest of them; not at all where a layer outside of `own` has it.
        """
        others = (other for k, other in enumerate(self.layers) if k < layer or k not in own)
        elsewhere = {item.name for other in others for item in other if item.kind == GRADIENTS}
        return sum(item.size for item in self.layers[layer] if item.kind == GRADIENTS and item.name not in elsewhere)


def all_on_each(layers: Sequence[Collection[int]], count: int) -> bool:
    """Whether several devices have layers, and each of these all `count`: then their gradients are wanted everywhere.

    layers: those of each device; none of one without work.
    """
    busy = [own for own in layers if own]
    return len(busy) > 1 and all(len(own) == count for own in busy)


def by_kind(items: Iterable[Item]) -> dict[str, int]:
    """Bytes of some items by kind."""
    found: dict[str, int] = {}
    for item in items:
        found[item.kind] = found.get(item.kind, 0) + item.size
    return found
