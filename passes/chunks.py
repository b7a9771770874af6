"""Chunk lengths worth trying."""

from __future__ import annotations

import math

SHORTEST = 16
MOST_CHUNKS = 4096
FEWEST_CHUNKS = 32  # for each of several devices, unless they are shorter than SHORT
SHORT = 1024
FEW = (2, 3, 4, 6, 8, 12, 16)  # chunks of a range that is joined by summaries
LONGEST = {"cpu": 2048, "cuda": 65536}  # past this hardly anything gets faster, and holes between tensors cost memory


def candidate_chunks(seq_len: int, device_kind: str, devices: int = 1) -> list[int]:
    """Powers of two from 16, and even divisions of the sequence, up to the longest that serves a device; at most 4,096 chunks.

    Several devices wait for each other's first chunks, so from some length on there are at least 32 chunks for each.
    """
    shortest_allowed = math.ceil(seq_len / MOST_CHUNKS)
    longest = max(LONGEST[device_kind], 2 * shortest_allowed)  # there is a power of two between a number and its double
    if devices > 1:
        longest = min(longest, max(SHORT, 2 * shortest_allowed, seq_len // (FEWEST_CHUNKS * devices)))
    lengths = {math.ceil(seq_len / parts) for parts in range(1, 17)}
    length = SHORTEST
    while length < seq_len:
        lengths.add(length)
        length *= 2
    return sorted(n for n in lengths if shortest_allowed <= n <= longest)


def long_chunks(seq_len: int, device_kind: str, devices: int) -> list[int]:
    """Lengths of which a device has a few, for ranges that are joined by summaries: there nobody waits for a single chunk."""
    lengths = {math.ceil(seq_len / (devices * parts)) for parts in FEW}
    return sorted(n for n in lengths if SHORTEST <= n <= max(LONGEST[device_kind], 2 * math.ceil(seq_len / MOST_CHUNKS)))
