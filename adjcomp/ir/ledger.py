"""The verifier's ledger: which work of a step is done, by tile, layer and device, and what may come next."""

from __future__ import annotations

from adjcomp.ir.actions import Action, Adjoint, Forward, HeadVjp, Loss
from adjcomp.ir.costs import StackCosts, Tie
from adjcomp.ir.rules import BrokenRule


class Ledger:
    """What has been done so far. Every method raises BrokenRule where its work is done too early, twice, or not at all."""

    def __init__(self, costs: StackCosts, devices: int) -> None:
        self.costs = costs
        self.started = [False for _ in range(devices)]
        self.turned = [False for _ in range(devices)]
        self.adjoints_left = {k: costs.chunk_count for k in range(costs.head + 1) if costs.tile(k, 0).has_vjp}
        self.holders: dict[int, set[int]] = {}  # layer -> devices with gradients of it
        self._done: set[tuple[str, int, int]] = set()

    def once(self, what: str, layer: int, chunk: int) -> None:
        """Something that is done once in a step."""
        if (what, layer, chunk) in self._done:
            raise BrokenRule(f"{what} of layer {layer}, chunk {chunk} is done a second time")
        self._done.add((what, layer, chunk))

    def start(self, device: int, first: int, last: int) -> None:
        """The initial states of layers `first` … `last`."""
        if self.started[device]:
            raise BrokenRule("the plan starts twice")
        self.started[device] = True
        for layer in range(first, last + 1):
            self.once("Start", layer, 0)

    def border(self, device: int, layer: int, chunk: int) -> None:
        """Something done to the state of a layer after a chunk; -1: to the initial one."""
        if not self.started[device]:
            raise BrokenRule("the plan has to start first")
        if not (0 <= layer <= self.costs.head and -1 <= chunk < self.costs.chunk_count):
            raise BrokenRule(f"there is no state of layer {layer} after chunk {chunk}")

    def turn(self, device: int, first: int, last: int) -> None:
        """The end of the forward on a device."""
        if not self.started[device] or self.turned[device]:
            raise BrokenRule("the turn comes once, after the start")
        if len(self.turned) == 1:
            self._all_forward()
        self.turned[device] = True
        for layer in range(first, last + 1):
            self.once("Turn", layer, 0)

    def tile(self, kind: type[Action], device: int, layer: int, chunk: int, keep: bool) -> None:
        """An action of `kind` on a tile."""
        if not self.started[device]:
            raise BrokenRule("the plan has to start first")
        if not (0 <= layer <= self.costs.head and 0 <= chunk < self.costs.chunk_count):
            raise BrokenRule(f"there is no tile of layer {layer}, chunk {chunk}")
        if layer == self.costs.head and kind in (Forward, Adjoint):
            raise BrokenRule(f"{kind.__name__} is for the stem and the layers; the head has Loss and HeadVjp")
        self.half(device, forward=kind in (Forward, Loss), what=kind.__name__)
        if self.costs.tile(layer, chunk).reads_past:
            self._in_order(kind, layer, chunk)
        if keep and not self.costs.tile(layer, chunk).has_vjp:
            raise BrokenRule(f"layer {layer} has no VJP: nothing to keep internals for and nothing to run")
        if kind in (Forward, Loss):
            self.once("Forward", layer, chunk)
        elif kind in (Adjoint, HeadVjp):
            self.once("Adjoint", layer, chunk)
            self.adjoints_left[layer] -= 1
            self.holders.setdefault(layer, set()).add(device)

    def _in_order(self, kind: type[Action], layer: int, chunk: int) -> None:
        """Attention: the keys of every chunk before have to be there, and cotangents from every chunk after."""
        before = chunk == 0 or ("Forward", layer, chunk - 1) in self._done
        last = kind not in (Adjoint, HeadVjp) or chunk == self.costs.chunk_count - 1
        after = last or ("Adjoint", layer, chunk + 1) in self._done
        if not before or not after:
            raise BrokenRule(f"layer {layer} attends over time: its chunks come in order, and their VJPs in the opposite one")

    def half(self, device: int, *, forward: bool, what: str) -> None:
        """Something that belongs to the forward, before the turn of its device, or to the backward."""
        if not self.started[device]:
            raise BrokenRule("the plan has to start first")
        if self.turned[device] == forward:
            raise BrokenRule(f"{what} belongs {'before' if forward else 'after'} the turn")

    def adds(self, device: int, layer: int) -> None:
        """Something but a VJP of a tile adds to the gradients of a layer, which its device must have."""
        if device not in self.holders.get(layer, ()):
            raise BrokenRule(f"device {device} has no gradients of layer {layer} to add to")

    def complete(self, layers: tuple[int, ...]) -> set[int]:
        """The devices that hold gradients of `layers`; empty unless all VJPs of these are done."""
        if any(self.adjoints_left.get(layer) != 0 for layer in layers):
            return set()
        return {holder for layer in layers for holder in self.holders.get(layer, ())}

    def publish(self, device: int, layer: int) -> None:
        """The gradients of a layer are handed out."""
        if device not in self.complete((layer,)):
            raise BrokenRule(f"layer {layer} has no complete gradients to publish")
        if len(self.holders[layer]) > 1 and ("Sum", layer, 0) not in self._done:
            raise BrokenRule(f"the gradients of layer {layer} are on {len(self.holders[layer])} devices and not added up")
        for index, tie in enumerate(self.costs.ties):
            if layer in tie.layers and self._apart(tie) and ("SumTied", index, 0) not in self._done:
                raise BrokenRule(f"layers {', '.join(map(str, tie.layers))} share parameters on several devices, not added up")
        self.once("Publish", layer, device)

    def finish(self) -> None:
        """The end of the plan."""
        for device, started in enumerate(self.started):
            if started and not self.turned[device]:
                raise BrokenRule(f"the plan never turns to the backward on device {device}")
        self._all_forward()
        for layer, left in self.adjoints_left.items():
            if left:
                raise BrokenRule(f"layer {layer} has {left} of {self.costs.chunk_count} adjoints missing")
            for device in sorted(self.holders.get(layer, ())):
                if ("Publish", layer, device) not in self._done:
                    raise BrokenRule(f"the gradients of layer {layer} are never published on device {device}")

    def _all_forward(self) -> None:
        tiles = ((k, c) for c in range(self.costs.chunk_count) for k in range(self.costs.head + 1))
        missing = [tile for tile in tiles if ("Forward", *tile) not in self._done]
        if missing:
            raise BrokenRule(
                f"the forward of {len(missing)} tiles is missing, first layer {missing[0][0]}, chunk {missing[0][1]}"
            )

    def _apart(self, tie: Tie) -> bool:
        """Whether some of the layers that share parameters are on devices that don't have the others."""
        if len(self.turned) == 1:
            return False
        holders = [self.holders.get(layer, set()) for layer in tie.layers]
        return any(other != holders[0] for other in holders)
