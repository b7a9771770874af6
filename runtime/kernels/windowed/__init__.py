"""Windowed VJPs of the recurrences in torch, for every device: see `adjcomp.ops.windowed` for what they compute."""
