"""The verifier's view of a stretch between a Fork and its Join: who touches what, and the most that the streams need at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from adjcomp.ir.costs import StackCosts
from adjcomp.ir.values import Value


class RaceError(Exception):
    """What an action does depends on how fast another stream is."""


class Section:
    """One stretch. `live`: the values that are live at its Fork."""

    def __init__(self, costs: StackCosts, live: Mapping[Value, int]) -> None:
        self.before = dict(live)
        self.groups = [tie.layers for tie in costs.ties] + list(costs.shared_sides)
        self.readers: dict[Value, set[int]] = {}
        self.writer: dict[Value, int] = {}
        self.made: dict[Value, int] = {}  # values written here and their bytes
        self.dropper: dict[Value, int] = {}
        self.adder: dict[tuple[str, int], int] = {}  # a layer or a group of layers -> the stream that adds to its gradients
        self.level: dict[int, int] = {}
        self.most: dict[int, int] = {}

    @property
    def extra_bytes(self) -> int:
        """The most that all streams together need over what was live at the Fork, in any order."""
        return sum(self.most.values())

    def claim(self, stream: int, layer: int) -> None:
        """A VJP of `layer` runs on `stream`."""
        shared = [("layers that share a gradient", i) for i, layers in enumerate(self.groups) if layer in layers]
        for key in (("layer", layer), *shared):
            other = self.adder.setdefault(key, stream)
            if other != stream:
                raise RaceError(f"streams {other} and {stream} both add to the gradients of layer {layer}")

    def run(
        self,
        stream: int,
        reads: Iterable[Value],
        writes: Sequence[tuple[Value, int]],
        frees: Iterable[Value],
        owns: Iterable[Value],
        workspace: int,
    ) -> None:
        """One action on `stream`."""
        for value in reads:
            if self.writer.get(value, stream) != stream:
                raise RaceError(f"reads {value}, which stream {self.writer[value]} may not have written yet")
            self.readers.setdefault(value, set()).add(stream)
        held_back = sum(self.before[value] for value in owns if value in self.before)
        level = self.level.get(stream, 0)
        after = level
        for value, size in writes:
            if self.dropper.get(value, stream) != stream:
                raise RaceError(f"writes {value}, which stream {self.dropper[value]} may not have dropped yet")
            self.writer[value], self.made[value] = stream, size
            after += size
        for value in frees:
            if self.readers.get(value, set()) - {stream}:
                raise RaceError(f"drops {value}, which another stream may still read")
            self.dropper[value] = stream
            after -= self.made.pop(value, 0)  # what was live at the Fork stays until the Join
        self.most[stream] = max(self.most.get(stream, 0), level + workspace + held_back, after)
        self.level[stream] = after
