"""What segments of layers need in a layer-major plan: for every first layer a and last layer b at once, as matrices [a, b].

Let L be the bytes that the segments below leave, the residual chunks between them included. With d what a column of the segment
leaves (of all chunks: D), F what it needs in its forward over what was live before, a segment fits in the forward if

    R + L + max over c of (c d + F) <= B.

In its backward, column by column from the last, the columns that are still to come have left theirs but no residual chunk above
the segment, the cotangents between it and its upper neighbour are there for these, and those to its lower neighbour for the
others. P is what a column needs on top of that: the pass through the segment, its VJPs, the gradients that are there meanwhile.
Everything that is a maximum over layers k of the segment has the form f(a, b) + max of h(k) over a <= k <= b.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.ir.modes import bottom_layer
from adjcomp.ir.values import has_adjoint
from adjcomp.passes.schedule.column import Ints

NONE = -(1 << 60)  # bytes of a maximum over nothing


@dataclass(frozen=True)
class SegmentNeeds:
    """Bytes by first and last layer; `need`: of the budget, for L = 0. Shapes (layers, layers); only a <= b counts."""

    left: Ints  # D
    need: Ints


class _Place(Enum):
    """Where a chunk is: its backward makes a segment's accumulators, adds to them, or publishes them."""

    FIRST = "first"
    INNER = "inner"
    LAST = "last"


@dataclass(frozen=True)
class _Chunk:
    """One kind of chunk, by layer; bytes. Layers without a VJP keep nothing."""

    x: Ints
    below: Ints  # x of the layer below; 0 for the stem
    keep: Ints
    cotangent: Ints
    passed: Ints  # cotangent that the VJP makes for the layer below
    forward_workspace: Ints
    keep_workspace: Ints
    adjoint_workspace: Ints
    border_in: Ints
    border_out: Ints
    adjoint_change: Ints  # adjoint state made, less the one that was taken in
    reads_input: Ints  # 1 or 0
    reads_carry: Ints


def segment_needs(costs: StackCosts, resident: int, beside: int, *, held: bool) -> SegmentNeeds:
    """Segments that hold the internals of all chunks from the forward, or recompute all of them.

    resident: bytes live during the whole step. beside: those that the Turn brings but gradients. At least two chunks; no VJP may
    read what its tile made.
    """
    kinds = [_chunk(costs, chunk) for chunk in (0, min(1, costs.chunk_count - 1), costs.chunk_count - 1)]
    first, inner, last = kinds
    if costs.chunk_count == 2:
        inner = first
    start = np.array([t.carry_bytes for t in costs.layers], np.int64)
    lam = np.array([t.adjoint_bytes if has_adjoint(t) else 0 for t in costs.last_layers], np.int64)
    full, end = _left(first, held), _left(last, held)
    count = costs.chunk_count
    left = (count - 1) * full + end
    forward = np.maximum(_forward(first, held) + np.maximum(0, (count - 2) * full), (count - 1) * full + _forward(last, held))
    before = resident + beside + np.cumsum(start)[None, :] + np.cumsum(lam)[None, :]
    own, own_end = full - first.x[None, :] + first.cotangent[None, :], end - last.x[None, :] + last.cotangent[None, :]
    done, done_end = _below(first.cotangent - first.x), _below(last.cotangent - last.x)
    done_end = done_end - _sums(first.border_out)  # the border after the column went with the one that is done
    gradients = _Gradients(costs)
    rows = [(count - 1) * own + own_end + _backward(last, held, gradients, _Place.LAST)]
    ends = {1, count - 2} if count > 2 else set()
    peak = _backward(inner, held, gradients, _Place.INNER)
    rows += [(chunk + 1) * own + (count - 2 - chunk) * done + done_end + peak for chunk in sorted(ends)]
    rows.append(own + (count - 2) * done + done_end + _backward(first, held, gradients, _Place.FIRST))
    backward = np.maximum.reduce(rows) + before
    return SegmentNeeds(left, np.maximum(forward + resident + int(start.sum()), backward))


def _chunk(costs: StackCosts, chunk: int) -> _Chunk:
    """The numbers of a chunk's tiles."""
    bottom, layers = bottom_layer(costs), range(costs.head + 1)
    tiles, before = [costs.tile(k, chunk) for k in layers], [costs.tile(k, max(chunk - 1, 0)) for k in layers]

    def numbers(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    def trained(values: list[int]) -> Ints:
        return numbers([value if k >= bottom else 0 for k, value in enumerate(values)])

    x = numbers([tile.stream_bytes if k < costs.head else 0 for k, tile in enumerate(tiles)])
    cotangent = trained([tile.cotangent_bytes if k < costs.head else 0 for k, tile in enumerate(tiles)])
    lower = np.concatenate((np.zeros(1, np.int64), cotangent[:-1]))
    return _Chunk(
        x=x,
        below=np.concatenate((np.zeros(1, np.int64), x[:-1])),
        keep=trained([tile.keep_bytes for tile in tiles]),
        cotangent=cotangent,
        passed=lower * numbers([costs.makes_cotangent(k, chunk) for k in layers]),
        forward_workspace=numbers([tile.forward_workspace_bytes for tile in tiles]),
        keep_workspace=numbers(
            [t.keep_workspace_bytes if k >= bottom else t.forward_workspace_bytes for k, t in enumerate(tiles)]
        ),
        adjoint_workspace=numbers([t.adjoint_workspace_bytes if k >= bottom else NONE for k, t in enumerate(tiles)]),
        border_in=numbers([tile.carry_bytes for tile in before]),
        border_out=numbers([0 if chunk == costs.chunk_count - 1 else tile.carry_bytes for tile in tiles]),
        adjoint_change=numbers([(_lam(b) if chunk > 0 else 0) - _lam(t) for t, b in zip(tiles, before, strict=True)]),
        reads_input=trained([tile.reads_input and k > 0 for k, tile in enumerate(tiles)]),
        reads_carry=trained([tile.reads_carry for tile in tiles]),
    )


def _lam(tile: TileCost) -> int:
    return tile.adjoint_bytes if has_adjoint(tile) else 0


def _below(values: Ints) -> Ints:
    """By first layer a of a segment: the value of the layer a - 1; shape (layers, 1)."""
    return np.concatenate((np.zeros(1, np.int64), values[:-1]))[:, None]


def _sums(values: Ints) -> Ints:
    """Sum of values over a … b."""
    total = np.cumsum(values)
    return np.asarray(total[None, :] - (total - values)[:, None])


def _up_to(values: Ints) -> Ints:
    """Sum of values over a … k - 1, for k from a on."""
    return _sums(values) - values[None, :]


def _most(table: Ints) -> Ints:
    """Maximum over k = a … b of table[a, k]."""
    size = len(table)
    return np.asarray(np.maximum.accumulate(np.where(np.tri(size, k=-1, dtype=bool), NONE, table), axis=1))


def _stays(chunk: _Chunk, held: bool) -> Ints:
    """By layer, what its forward leaves, less what it drops: of tiles that aren't `held` their borders alone, without x."""
    if not held:
        return chunk.border_out
    dropped = (1 - chunk.reads_carry) * chunk.border_in + (1 - chunk.reads_input) * chunk.below
    return np.asarray(chunk.keep + chunk.border_out + chunk.x - dropped)


def _left(chunk: _Chunk, held: bool) -> Ints:
    """d: what a column leaves in the forward, the x of its highest layer included."""
    sums = _sums(_stays(chunk, held))
    return sums if held else sums + chunk.x[None, :]


def _forward(chunk: _Chunk, held: bool) -> Ints:
    """F: the peak of a column's forward over what was live before."""
    workspace = chunk.keep_workspace if held else chunk.forward_workspace
    live = _up_to(_stays(chunk, held))
    if not held:  # x of the layer below is live, but that of the layer below the segment was there before
        live = live + np.where(np.eye(len(live), dtype=bool), 0, chunk.below[None, :])
    return _most(live + workspace[None, :])


def _backward(chunk: _Chunk, held: bool, gradients: _Gradients, place: _Place) -> Ints:
    """P: the peak of a column's backward, over what is live when it starts but gradients, these included."""
    there = gradients.during(place)
    gain = chunk.keep + chunk.x - (1 - chunk.reads_input) * chunk.below - (1 - chunk.reads_carry) * chunk.border_in
    change = (
        chunk.passed
        + chunk.adjoint_change
        - chunk.keep
        - chunk.cotangent
        - chunk.reads_carry * chunk.border_in
        - chunk.reads_input * chunk.below
    )
    after = np.cumsum(change)
    top = np.zeros_like(_sums(gain)) if held else _sums(gain) - chunk.x[None, :]
    most = _most(np.broadcast_to(chunk.adjoint_workspace - after + there.rising, top.shape)) + there.offset
    if place is _Place.FIRST:
        published = _most(np.broadcast_to(gradients.cast - (after - change) + there.rising, top.shape)) + there.offset
        most = np.maximum(most, published)
    peak = top + after[None, :] + most
    if not held:
        peak = np.maximum(peak, _most(_up_to(gain) + chunk.keep_workspace[None, :]) + gradients.before(place))
    return np.asarray(peak)


@dataclass(frozen=True)
class _There:
    """Gradients in the VJP of layer k of a segment [a, b]: offset[a, b] + rising[k]."""

    offset: Ints
    rising: Ints


class _Gradients:
    """Bytes of gradients while a segment runs backward: those of the segments above are published or, where they are shared with
    lower layers, accumulators still.
    """

    def __init__(self, costs: StackCosts) -> None:
        size = costs.head + 1
        made, shrinks = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for gradient in costs.gradients:
            made[gradient.layers[-1]] += gradient.accumulator_bytes
            shrinks[gradient.layers[0]] += gradient.accumulator_bytes - gradient.published_bytes
        self.made, self.shrinks = made, shrinks
        self.cast = np.array([size if costs.tile(k, 0).has_vjp else NONE for k, size in enumerate(costs.publish_bytes)], np.int64)
        self.above = (made.sum() - np.cumsum(made)) - (shrinks.sum() - np.cumsum(shrinks))  # by b: when the segment starts

    def during(self, place: _Place) -> _There:
        """In the VJPs of the last, an inner or the first chunk."""
        own = _sums(self.made)
        if place is _Place.LAST:  # layers from b down to k have made theirs
            total = np.cumsum(self.made)
            return _There((self.above + total)[None, :] + np.zeros_like(own), self.made - total)
        if place is _Place.INNER:
            return _There(self.above[None, :] + own, np.zeros_like(self.made))
        gone = np.cumsum(self.shrinks)  # layers above k are published
        return _There(self.above[None, :] + own - gone[None, :], gone)

    def before(self, place: _Place) -> Ints:
        """In the pass before the VJPs."""
        own = _sums(self.made)
        return np.asarray(self.above[None, :] + (np.zeros_like(own) if place is _Place.LAST else own))
