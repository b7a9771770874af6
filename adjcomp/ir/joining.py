"""How a range of time is joined to what comes before and after it by summaries: what becomes of each state, and the programs.

States are of two kinds. A *halo* (the tail of a convolution) is made of the last steps of the range alone. A *linear* state is
moved by a product and added to, out = P · in + E, whatever comes in; so the summary (P, E) of a range says all of it, and ranges
join by applying one after the other. Cotangents of states go the other way, in = Pᴴ · out + E'.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from adjcomp.ir.program import Program


class CarryKind(enum.Enum):
    """What a range does to one tensor of a layer's state."""

    HALO = "halo"  # it leaves nothing of it: what goes out is made of the last steps
    ELEMENTWISE = "elementwise"  # P * state, P broadcast to the state's shape
    VECTOR = "vector"  # P @ state: P (B, N, N), state (B, N)
    MATRIX = "matrix"  # P @ state: P (B, H, K, K), state (B, H, K, V)


@dataclass(frozen=True)
class CarryRule:
    """One carry: its kind, and shape and dtype of its product (a halo has none: () and the state's dtype)."""

    kind: CarryKind
    product_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_linear(self) -> bool:
        """Whether a summary says what becomes of it."""
        return self.kind is not CarryKind.HALO


@dataclass(frozen=True)
class DerivedProgram:
    """A program made of a part of a tile, and what its arguments and results are.

    Arguments, in this order: the template's inputs `reads`; the template's outputs `reads_outputs`; of what the tile keeps for
    its VJP, the values numbered `saved`; the cotangents of the template's outputs `cotangents`; the running products of the
    carries `products`. None of them is taken over: the caller's references stay good. Results: the carries `carries`, or their
    cotangents, then the products of the carries `products` with this chunk joined; see `JoinPrograms`.
    """

    program: Program
    reads: tuple[int, ...]
    reads_outputs: tuple[int, ...]
    saved: tuple[int, ...]
    cotangents: tuple[int, ...]
    carries: tuple[int, ...]
    products: tuple[int, ...]


@dataclass(frozen=True)
class JoinPrograms:
    """What joins ranges of one template, whose chunks have one length.

    rules: by carry. steps: how many steps the halos look back; chunks of ranges that hand halos on have at least as many.

    tail: the template's inputs, of the last `steps` steps of a range (streams, sides and the first step's number are those of
    these steps; no carry is read) -> the halos `carries`, as they leave the range. None without halos.

    summarize: the template's inputs at a chunk, with halos and end states so far for carries -> every carry after the chunk, end
    states and halos, then products. Of a halo, only what summaries read is good. None without linear states.

    adjoint_summarize: what it reads of the arguments of the tile's VJP -> the cotangents of the incoming states `carries`, all
    of them linear, then the products of cotangents. It reads no cotangent of a halo. None where no such cotangent travels.

    tail_vjp: the tail's inputs and the cotangents of the outgoing halos (`cotangents`) -> the gradient of the stream, of `steps`
    steps, where one is wanted; gradients of parameters and sides are added to accumulators, numbered as in
    `TilePrograms.gradients`; those of sides with time are of the last `steps` steps. None where no halo takes a cotangent.
    """

    rules: tuple[CarryRule, ...]
    steps: int
    tail: DerivedProgram | None
    summarize: DerivedProgram | None
    adjoint_summarize: DerivedProgram | None
    tail_vjp: DerivedProgram | None
