"""Chunk lengths worth considering for a sequence."""

from __future__ import annotations

MOST_CHUNKS = 2048  # of the shortest length; more chunks than that cost more to plan and launch than they save
FEW = 8  # even cuts into up to this many chunks


def chunk_lengths(seq_len: int, shortest: int = 16) -> tuple[int, ...]:
    """Powers of two, one and a half times those, and cuts into a few even chunks; tokens, shortest first.

    Neighbours differ by at most 1.5 times. The best length grows like the square root of `seq_len`: borders take bytes in
    proportion to seq_len / length, internals of the chunk at work in proportion to length.
    """
    if seq_len < 1:
        raise ValueError(f"a sequence has at least one token, not {seq_len}")
    least = min(seq_len, max(shortest, -(-seq_len // MOST_CHUNKS)))
    powers = [1 << k for k in range(seq_len.bit_length())]
    lengths = {*powers, *(3 * p // 2 for p in powers), *(-(-seq_len // n) for n in range(1, FEW + 1))}
    return tuple(sorted(length for length in lengths if least <= length <= seq_len))
