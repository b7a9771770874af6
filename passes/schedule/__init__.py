"""Solvers that choose what to keep and what to recompute, all with one signature."""

from adjcomp.passes.schedule.candidates import minimum_bytes
from adjcomp.passes.schedule.lengths import chunk_lengths
from adjcomp.passes.schedule.search import solve

__all__ = ["chunk_lengths", "minimum_bytes", "solve"]
