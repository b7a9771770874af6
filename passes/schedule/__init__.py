"""Solvers that choose what to keep and what to recompute, all with one signature."""

from adjcomp.passes.schedule.search import minimum_bytes, solve

__all__ = ["minimum_bytes", "solve"]
