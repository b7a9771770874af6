"""Which programs of a plan's tiles are recorded once and replayed as one launch (a CUDA graph), and the memory that this takes.

A recording reads and writes fixed addresses. So a tile's inputs are copied to places that all recordings share, its results are
copied from where they come to be, and what it allocates in between is taken from a pool that all recordings share, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adjcomp.ir.program import Program

ALIGNMENT = 512  # bytes: the places of inputs start at multiples of this
RESIDENT_KIND = "cuda graphs"  # under which a plan counts what recordings hold


@dataclass(frozen=True)
class RecordedPrograms:
    """The recorded programs of chunks 0 … C - 2; a last chunk that is shorter runs as it is.

    input_bytes: the places of inputs. pool_bytes: what a recording allocates at most. library_bytes: what libraries of products
    allocate for the stream on which recordings are made.
    """

    programs: tuple[Program, ...]
    input_bytes: int
    pool_bytes: int
    library_bytes: int

    @property
    def total_bytes(self) -> int:
        """What is held during the whole step."""
        return self.input_bytes + self.pool_bytes + self.library_bytes


@dataclass(frozen=True)
class RecordingPolicy:
    """What is recorded: all programs of residual layers, or (`only_worth`) those that take longer to launch than to run."""

    only_worth: bool
    library_bytes: int


def place_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the places for inputs of these sizes, each aligned."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
