"""Counter-based uniforms: a number depends on its place only, so chunks, placement and recomputation draw the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck, Kind, Size
from adjcomp.ops.library import call, define


def counter_uniform(
    seed: Tensor,
    node: int,
    shape: tuple[Size, ...],
    time_dim: int,
    time_offset: Tensor,
    *,
    batch: Size = 1,
) -> Tensor:
    """Uniforms in [0, 1), float32 with 24 random bits, keyed by (seed, node, outer, absolute time, inner).

    `outer` numbers the dimensions before `time_dim`, `inner` those after it, both row-major. Where batch and time are merged in
    one dimension of batch * T rows, `time_dim` is that dimension and `batch` says how many sequences it holds; the numbers are
    those of the same tensor with batch and time apart.

    Args:
        seed: int64 scalar tensor, on the device of the result. node: which random op of the model draws.
        shape: of the result. time_dim: the (merged) time dimension, 0 <= time_dim < len(shape).
        time_offset: int64 scalar tensor, the absolute time of the first step. batch: sequences merged into the time dimension.

    Returns:
        float32, contiguous, of `shape`, on seed's device. Not differentiable.

    Raises:
        ValueError: a time dimension outside the shape, a batch that does not divide it, or devices that do not match.
        TypeError: a seed or offset that is not int64.
    """
    check = ArgumentCheck("counter_uniform")
    check.tensor("seed", seed, "", Kind.INDEX)
    check.tensor("time_offset", time_offset, "", Kind.INDEX)
    if not 0 <= time_dim < len(shape):
        raise check.error("time_dim", time_dim, f"0 <= time_dim < {len(shape)}, the rank of `shape`")
    rows = shape[time_dim]
    if isinstance(rows, int) and isinstance(batch, int) and (batch < 1 or rows % batch):
        raise check.error("batch", batch, f"a divisor of shape[time_dim] = {rows}")
    drawn: Tensor = call("counter_uniform", seed, node, list(shape), time_dim, time_offset, batch)
    return drawn


def _fake(seed: Tensor, node: int, shape: list[Size], time_dim: int, time_offset: Tensor, batch: Size) -> Tensor:
    return seed.new_empty(tuple(shape), dtype=torch.float32)


define(
    "counter_uniform",
    "(Tensor seed, int node, SymInt[] shape, int time_dim, Tensor time_offset, SymInt batch) -> Tensor",
    _fake,
)
