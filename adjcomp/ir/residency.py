"""What lives beside the tiles, by layer: which bytes a device holds that has some of the layers."""

from __future__ import annotations

from dataclasses import dataclass

GRADIENTS = "gradients"  # the kind of gradient accumulators


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
        items = {(item.name, item.kind): item for layer in self.layers[first : last + 1] for item in layer}
        resident: dict[str, int] = {}
        turn: dict[str, int] = {}
        for item in items.values():
            kinds = turn if item.from_turn else resident
            kinds[item.kind] = kinds.get(item.kind, 0) + item.size
        return resident, turn

    def gradients(self, layer: int, own: range) -> int:
        """Bytes of the gradient accumulators that are added up with `layer` over devices that all have the layers `own`.

        A parameter that several layers share counts with the lowest of them; not at all where a layer outside of `own` has it.
        """
        others = (other for k, other in enumerate(self.layers) if k < layer or k not in own)
        elsewhere = {item.name for other in others for item in other if item.kind == GRADIENTS}
        return sum(item.size for item in self.layers[layer] if item.kind == GRADIENTS and item.name not in elsewhere)
