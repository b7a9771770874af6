"""Counter-based uniforms: where a number stands decides it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adjcomp import ops
from adjcomp.ops import reference


def draw(seed: int, node: int, shape: tuple[int, ...], time_dim: int, offset: int = 0, batch: int = 1) -> Tensor:
    return ops.counter_uniform(torch.tensor(seed), node, shape, time_dim, torch.tensor(offset), batch=batch)


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 1000),
    st.integers(0, 2**40),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_equals_the_reference_bit_for_bit(seed: int, node: int, offset: int, outer: int, steps: int, inner: int) -> None:
    got = draw(seed, node, (outer, steps, inner), 1, offset)
    assert got[-1, -1, -1].item() == reference.counter_uniform(seed, node, outer - 1, offset + steps - 1, inner - 1)
    assert got[0, 0, 0].item() == reference.counter_uniform(seed, node, 0, offset, 0)


@given(st.integers(1, 30))
def test_chunks_draw_what_the_whole_draws(cut: int) -> None:
    whole = draw(7, 3, (2, 31, 4, 5), 1)
    torch.testing.assert_close(draw(7, 3, (2, cut, 4, 5), 1), whole[:, :cut], rtol=0, atol=0)
    torch.testing.assert_close(draw(7, 3, (2, 31 - cut, 4, 5), 1, cut), whole[:, cut:], rtol=0, atol=0)


def test_merged_rows_draw_what_separate_ones_draw() -> None:
    apart = draw(7, 3, (2, 6, 5), 1, 11)
    torch.testing.assert_close(draw(7, 3, (12, 5), 0, 11, batch=2).view(2, 6, 5), apart, rtol=0, atol=0)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    sample = draw(0, 0, (64, 128, 128), 1)
    assert sample.min() >= 0
    assert sample.max() < 1
    assert abs(sample.mean().item() - 0.5) < 1e-3
    assert abs(sample.var().item() - 1 / 12) < 1e-3
    others = [
        draw(1, 0, (64, 128, 128), 1),
        draw(0, 1, (64, 128, 128), 1),
        sample.roll(1, 0),
        sample.roll(1, 1),
        sample.roll(1, 2),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([sample.flatten(), other.flatten()]))[0, 1].item()) < 4e-3


def test_errors() -> None:
    with pytest.raises(ValueError, match="`time_dim` is 2; supported: 0 <= time_dim < 2"):
        draw(0, 0, (3, 4), 2)
    with pytest.raises(ValueError, match="`batch` is 2; supported: a divisor of shape"):
        draw(0, 0, (3, 4), 0, batch=2)
    with pytest.raises(TypeError, match="`seed` is of dtype float32; supported: int64"):
        ops.counter_uniform(torch.tensor(0.0), 0, (3,), 0, torch.tensor(0))
