"""Summaries of ranges of time join to what the op does to the whole."""

from __future__ import annotations

import op_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import SMALL
from summary_cases import FORWARD, summary_errors

from adjcomp import ops

NAMES = [name for name in SMALL if SMALL[name](1).name in FORWARD] + ["dense_complex"]
CASES = {**SMALL, "dense_complex": lambda t: op_cases.dense_scan(t, complex_=True)}


@pytest.mark.parametrize("name", NAMES)
def test_summaries_of_any_ranges_join_to_the_whole(name: str) -> None:
    @given(st.integers(1, 100), st.data(), st.sampled_from([torch.float32, torch.float64]))
    def run(steps: int, data: st.DataObject, dtype: torch.dtype) -> None:
        cuts = data.draw(st.lists(st.integers(1, steps - 1), max_size=3, unique=True).map(sorted)) if steps > 1 else []
        torch.manual_seed(0)
        assert max(summary_errors(CASES[name](steps), cuts, dtype)) <= (4e-6 if dtype == torch.float32 else 1e-12)

    run()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_data(name: str) -> None:
    """The fake kernels say what the real ones return."""
    case = CASES[name](9)
    tensors = [
        case.given()[key].float() if not case.given()[key].is_complex() else case.given()[key] for key in FORWARD[case.name]
    ]
    summary = getattr(ops, f"{case.name}_summary")
    real, fake = summary(*tensors), summary(*(t.to("meta") for t in tensors))
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]


def test_errors_name_op_argument_and_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"ops\.linear_scan_summary: argument `b` is of shape \(1, 3, 2\)"):
        ops.linear_scan_summary(torch.rand(1, 4, 2), torch.rand(1, 3, 2))
    with pytest.raises(ValueError, match=r"ops\.ssd_summary: argument `B` is of 2 groups for 3 heads"):
        ops.ssd_summary(torch.rand(1, 4, 3, 2), torch.rand(1, 4, 3), torch.rand(3), torch.rand(1, 4, 2, 5))
