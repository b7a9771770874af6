"""Plans for machines of several devices: which device runs what, when, and what it keeps."""

from adjcomp.passes.place.search import solve_machine

__all__ = ["solve_machine"]
