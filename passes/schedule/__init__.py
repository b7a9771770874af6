"""Solvers that choose what to keep and what to recompute, all with one signature."""

from adjcomp.passes.schedule.candidates import minimum_bytes
from adjcomp.passes.schedule.lengths import chunk_lengths
from adjcomp.passes.schedule.search import Search, solve, solve_forms

__all__ = ["Search", "chunk_lengths", "minimum_bytes", "solve", "solve_forms"]
