"""bfloat16 and float16: no output or gradient is further from float64 than 1.5 times eager torch in the same dtype."""

from __future__ import annotations

import op_cases
import pytest
import torch
from op_cases import SMALL, Careful, errors_beside_eager, worse_than_eager

HALVES = (torch.bfloat16, torch.float16)
NAMES = [name for name in SMALL if name != "complex"]  # there is no complex dtype of 16 bits to speak of
LARGER = {
    "selective_scan": lambda: op_cases.selective_scan(300, 1, 40, 16),
    "ssd": lambda: op_cases.ssd(200, 1, 1, 2, 16, 16),
    "gated_delta_rule": lambda: op_cases.gated_delta_rule(200, 1, 2, 16, 16),
    "causal_conv1d": lambda: op_cases.causal_conv1d(200, 2, 40),
}


@pytest.mark.parametrize("steps", [1, 3, 50])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_no_worse_than_eager_throughout(name: str, dtype: torch.dtype, steps: int) -> None:
    torch.manual_seed(steps)
    errors = errors_beside_eager(SMALL[name](steps), dtype, Careful.THROUGHOUT)
    assert not worse_than_eager(errors), errors


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*NAMES, *(f"larger {name}" for name in LARGER)])
def test_no_worse_than_eager_that_rounds_at_the_edges_only(name: str, dtype: torch.dtype) -> None:
    """The two scans that return every state multiply by it as it was rounded for the caller: 1.41 times, where others have 1."""
    torch.manual_seed(0)
    case = LARGER[name.removeprefix("larger ")]() if name.startswith("larger") else SMALL[name](100)
    errors = errors_beside_eager(case, dtype, Careful.AT_THE_EDGES)
    factor = 1.5 if name in ("linear_scan", "dense_scan") else 1.1
    assert not worse_than_eager(errors, factor), errors


@pytest.mark.parametrize("dtype", HALVES)
def test_the_loss(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    errors = op_cases.loss_beside_eager(dtype, 60, 32, 700)
    assert not worse_than_eager(errors), errors


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [33, 1000])
def test_the_norm(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    errors = op_cases.norm_beside_eager(dtype, 40, width)
    assert not worse_than_eager(errors), errors
