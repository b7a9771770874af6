"""What the runtime runs: a plan, the stack it is a plan for, and the programs of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from adjcomp.ir.joining import JoinPrograms
from adjcomp.ir.plan import Plan
from adjcomp.ir.program import TilePrograms
from adjcomp.ir.recording import RecordedPrograms
from adjcomp.ir.stack import ResidualStack


@dataclass(frozen=True)
class Executable:
    """programs, last_programs: by template, for chunks 0 … C - 2 and for the last chunk. recorded: those that are replayed as one
    launch; None where the plan counts nothing for that. joins: by template, what joins ranges of chunks of full length; empty
    where the plan's costs say nothing of it.
    """

    stack: ResidualStack
    plan: Plan
    programs: tuple[TilePrograms, ...]
    last_programs: tuple[TilePrograms, ...]
    recorded: RecordedPrograms | None = None
    joins: tuple[JoinPrograms, ...] = ()

    def tile(self, layer: int, chunk: int) -> TilePrograms:
        """The programs of tile (layer, chunk)."""
        table = self.last_programs if chunk == self.plan.costs.chunk_count - 1 else self.programs
        return table[self.stack.layers[layer].template]

    def join(self, layer: int) -> JoinPrograms:
        """What joins ranges in `layer`."""
        return self.joins[self.stack.layers[layer].template]
