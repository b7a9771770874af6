"""Sliding sums over a window in O(T): two scans over blocks, no division, no difference.

A chunk of L steps is cut from its end into blocks of m = min(W, L) steps. The window of step i in a block starts inside of it and
ends in the W - 1 steps that follow the block, so
    λ[i] = S[i] + D[i]ᴴ R[i + W - 1],
S the reverse scan of G inside of the block, D[i] = A[end] … A[i+1] inside of it, and R[t] the sum of (A[t'] … A[start])ᴴ G[t']
over the following steps t' ≤ t. Each product of transitions lies inside of one window, so nothing grows that the result would not
hold as well, and a transition of zero is a transition like any other. Blocks of W steps touch every step twice; a chunk shorter
than the window is one block, and reads W - 1 steps for its L.

Legend: b batch, s block, l steps of the chunk, w steps of a block or of what follows it, n numbers of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.runtime.kernels.arithmetic import Mask, cast_like

SLICE_NUMBERS = 1 << 21  # state numbers, over batch and steps, that are worked on at once


@dataclass(frozen=True)
class Blocks:
    """How `steps` steps of a chunk, followed by `window - 1` more, are cut."""

    steps: int
    window: int

    @property
    def length(self) -> int:
        """Steps of a block."""
        return min(self.steps, self.window)

    @property
    def count(self) -> int:
        """Blocks of the chunk; the first may begin before it."""
        return -(-self.steps // self.length)

    @property
    def before(self) -> int:
        """Steps of the first block that lie before the chunk."""
        return self.count * self.length - self.steps

    def own(self, whole: Tensor) -> Tensor:
        """(b, s, m, …): the blocks of a value of the chunk and the steps after it, (b, L + W - 1, …)."""
        chunk = whole[:, : self.steps]
        if self.before:
            chunk = torch.cat([chunk.new_zeros((chunk.shape[0], self.before, *chunk.shape[2:])), chunk], 1)
        return _unflatten(chunk, self.count, self.length)

    def following(self, whole: Tensor) -> Tensor:
        """(b, s, W - 1, …): the steps after each block. Blocks are as long as the window wherever there is more than one."""
        if self.count == 1:
            return whole[:, None, self.steps :]
        behind = whole[:, self.length - self.before :]
        padded = torch.cat([behind, behind.new_zeros((behind.shape[0], 1, *behind.shape[2:]))], 1)
        return _unflatten(padded, self.count, self.length)[:, :, : self.window - 1]

    def joined(self, blocks: Tensor) -> Tensor:
        """(b, L, …) from (b, s, m, …)."""
        return blocks.flatten(1, 2)[:, self.before :]


def _unflatten(whole: Tensor, count: int, length: int) -> Tensor:
    return whole.reshape(whole.shape[0], count, length, *whole.shape[2:])


def diagonal_adjoint(a_bln: Tensor, g_bln: Tensor, steps: int, window: int) -> Tensor:
    """λ (b, L, n) from decays and cotangents of L + W - 1 steps, elementwise; complex decays enter conjugated."""
    if window == 1:
        return g_bln[:, :steps]
    blocks = Blocks(steps, window)
    decay = a_bln.conj().resolve_conj() if a_bln.is_complex() else a_bln
    own_a, own_g = blocks.own(decay), blocks.own(g_bln)
    later = torch.cat([own_a[:, :, 1:], torch.ones_like(own_a[:, :, :1])], 2).flip(2)
    inside = torch.ops.adjcomp.linear_scan.default(later.flatten(0, 1), own_g.flip(2).flatten(0, 1).contiguous(), None)[0]
    inside = inside.unflatten(0, own_g.shape[:2]).flip(2)
    reach = torch.cumprod(later, 2).flip(2)
    follow_a, follow_g = blocks.following(decay), blocks.following(g_bln)
    sums = torch.cumsum(torch.cumprod(follow_a, 2) * follow_g, 2)
    first = window - blocks.length  # steps of what follows in the window of a block's first step, and one more
    if first > 0:
        inside = inside + reach * sums[:, :, first - 1 :]
    else:
        inside[:, :, 1:] += reach[:, :, 1:] * sums
    return blocks.joined(inside)


def slices(size: int, numbers_each: int) -> list[slice]:
    """Ranges of `size` channels so that none has more than SLICE_NUMBERS numbers, of which a channel has `numbers_each`."""
    width = max(1, min(size, SLICE_NUMBERS // max(numbers_each, 1)))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def handed_on(dh0_bn: Tensor, tokens_blf: Tensor, after_bwf: Tensor) -> Tensor:
    """What travels to the chunk before: the cotangent of the incoming state, and the first W - 1 of this chunk's steps and those
    after it. tokens_blf: (b, L, features) of the chunk; after_bwf: (b, W - 1, features)."""
    count = after_bwf.shape[1]
    kept = torch.cat([tokens_blf[:, :count], after_bwf[:, : max(count - tokens_blf.shape[1], 0)]], 1)
    return torch.cat([dh0_bn, kept.flatten(1)], 1)


def steps_after(adjoint: Tensor, state: int, features: int, window: int) -> Tensor:
    """(b, W - 1, features): what came from the chunks after this one; `state` numbers of a state stand before it."""
    return adjoint[:, state:].reshape(adjoint.shape[0], window - 1, features)


def with_later(own: tuple[Tensor, ...], after_bwf: Tensor) -> list[Tensor]:
    """Each value of the chunk, (b, L, size), followed by its part of the steps after it: (b, L + W - 1, size)."""
    later = after_bwf.split([t.shape[2] for t in own], 2)
    return [torch.cat(pair, 1) for pair in zip(own, later, strict=True)]


def dense(grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None], mask: Mask) -> list[Tensor | None]:
    """Each cotangent in the dtype of its input and contiguous, as the op declares it; None where none is wanted."""
    made = cast_like(list(grads), list(inputs), mask[: len(inputs)])
    return [None if g is None else g.contiguous() for g in made]
