"""Solvers that choose what to keep and what to recompute, all with one signature."""
