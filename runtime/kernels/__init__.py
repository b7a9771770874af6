"""Implementations of the carried operations, by device."""
