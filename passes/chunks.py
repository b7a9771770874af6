"""Chunk lengths worth trying."""

from __future__ import annotations

import math

SHORTEST = 16
MOST_CHUNKS = 4096


def candidate_chunks(seq_len: int) -> list[int]:
    """Powers of two from 16, the whole sequence, and even divisions near the square root; at most 4,096 chunks."""
    lengths = {seq_len}
    length = SHORTEST
    while length < seq_len:
        lengths.add(length)
        length *= 2
    for parts in (2, 3, 4, 6):
        lengths.add(math.ceil(seq_len / parts))
    return sorted(n for n in lengths if math.ceil(seq_len / n) <= MOST_CHUNKS)
