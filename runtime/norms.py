"""Norms of adjoint states, noted in one call a tile and joined in batches: a small tensor for each would add up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adjcomp.runtime.values import Held, Tensor

BATCH = 512  # norms that are joined at once


class AdjointNorms:
    """Collects the norm of every part of an adjoint state, by layer and chunk."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []  # layer and chunk of each adjoint state
        self.owners: list[int] = []  # which of them each norm belongs to
        self.pending: list[Tensor] = []
        self.joined: list[Tensor] = []

    def note(self, layer: int, chunk: int, held: Held) -> None:
        """Note an adjoint state before a chunk, which may have several parts."""
        parts = [part for part in held if part is not None]
        if not parts:
            return
        self.owners += [len(self.places)] * len(parts)
        self.places.append((layer, chunk))
        self.pending += torch._foreach_norm(parts)
        if len(self.pending) >= BATCH:
            self._join()

    def _join(self) -> None:
        self.joined.append(torch.stack([norm.float() for norm in self.pending]))
        self.pending.clear()

    def matrix(self, layers: Sequence[int], chunks: int) -> Tensor:
        """The norm of all parts together, (layers, chunks) float32 on the CPU; zeros where nothing was noted."""
        found = torch.zeros(len(layers), chunks)
        if self.pending:
            self._join()
        if self.places:
            squares = torch.cat(self.joined).cpu().double().square()
            totals = squares.new_zeros(len(self.places)).index_add_(0, torch.tensor(self.owners), squares)
            rows = {layer: row for row, layer in enumerate(layers)}
            found[[rows[k] for k, _ in self.places], [c for _, c in self.places]] = totals.sqrt().float()
        return found
