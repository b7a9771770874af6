"""Segments to actions: the layer-major order of a step on one device.

Layers are cut into segments. The forward takes all chunks through one segment before it comes to the next, the backward likewise
from the top; inside of a segment the order is time-major. The residual chunks between two segments wait from the forward until
the upper one's backward has read them, and their cotangents until the lower one's has. Each layer is published right after its
last VJP, so that only the layers of one segment have accumulators at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adjcomp.ir.actions import Action, Forward, Loss, Publish, Recompute, Start, Turn
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.modes import bottom_layer
from adjcomp.passes.emit import vjp
from adjcomp.passes.lifetimes import drop_after_last_use


@dataclass(frozen=True)
class Segment:
    """Contiguous layers that are gone through together, and whether all their chunks hold internals from the forward."""

    first: int
    last: int
    held: bool


def check_segments(costs: StackCosts, segments: Sequence[Segment]) -> None:
    """ValueError unless `segments` are all layers in order, and the first one has a layer with a VJP."""
    ends = [(segment.first, segment.last) for segment in segments]
    starts = [0, *(last + 1 for _, last in ends)]
    if [first for first, _ in ends] != starts[:-1] or starts[-1] != costs.head + 1 or any(last < first for first, last in ends):
        raise ValueError(f"segments {ends} aren't the layers 0 to {costs.head} in order")
    if segments[0].last < bottom_layer(costs):
        raise ValueError("the first segment has no layer with a VJP")


def emit_layer_major(costs: StackCosts, segments: Sequence[Segment]) -> tuple[Action, ...]:
    """The actions of a step in segments of layers.

    Raises:
        ValueError: see `check_segments`.
    """
    check_segments(costs, segments)
    return drop_after_last_use(costs, list(_in_order(costs, segments)))


def _in_order(costs: StackCosts, segments: Sequence[Segment]) -> Iterator[Action]:
    """The actions in order, without what they drop."""
    yield Start(0, costs.head)
    for segment in segments:
        for chunk in range(costs.chunk_count):
            yield from _forward(costs, segment, chunk)
    yield Turn(0, costs.head)
    for segment in reversed(segments):
        for chunk in range(costs.chunk_count - 1, -1, -1):
            yield from _backward(costs, segment, chunk)


def _forward(costs: StackCosts, segment: Segment, chunk: int) -> Iterator[Action]:
    """One chunk through a segment."""
    bottom = bottom_layer(costs)
    for layer in range(segment.first, segment.last + 1):
        kept = segment.held and layer >= bottom
        yield Loss(chunk, kept) if layer == costs.head else Forward(layer, chunk, kept)


def _backward(costs: StackCosts, segment: Segment, chunk: int) -> Iterator[Action]:
    """The internals of one chunk again, unless they are held, and its VJPs; at chunk 0 gradients are complete."""
    bottom = bottom_layer(costs)
    for layer in () if segment.held else range(segment.first, segment.last + 1):
        yield Recompute(layer, chunk, layer >= bottom)
    for layer in range(segment.last, max(segment.first, bottom) - 1, -1):
        yield vjp(costs, layer, chunk)
        if chunk == 0:
            yield Publish(layer)
