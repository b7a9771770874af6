"""Chunk lengths worth trying."""

from __future__ import annotations

import math

SHORTEST = 16
MOST_CHUNKS = 4096
LONGEST = {"cpu": 2048, "cuda": 65536}  # past this a chunk's tensors leave every cache, and holes between them cost memory


def candidate_chunks(seq_len: int, device_kind: str) -> list[int]:
    """Powers of two from 16, and even divisions of the sequence, up to the longest that serves a device; at most 4,096 chunks."""
    longest = max(LONGEST[device_kind], math.ceil(seq_len / MOST_CHUNKS))
    lengths = {math.ceil(seq_len / parts) for parts in range(1, 17)}
    length = SHORTEST
    while length < seq_len:
        lengths.add(length)
        length *= 2
    shortest_allowed = math.ceil(seq_len / MOST_CHUNKS)
    return sorted(n for n in lengths if shortest_allowed <= n <= longest)
