"""Every op against its sequential float64 reference: outputs, states and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import SMALL, STRATEGIES, Case, gated_delta_rule, relative_errors


@pytest.mark.parametrize("steps", [1, 2, 3, 31, 32, 33, 64, 100, 130])
@pytest.mark.parametrize("name", SMALL)
def test_float32_is_within_2e_6_of_float64(name: str, steps: int) -> None:
    torch.manual_seed(steps)
    errors = relative_errors(SMALL[name](steps), torch.float32)
    assert max(errors.values()) <= 2e-6, errors


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_shape_and_any_optional_argument(name: str) -> None:
    @given(STRATEGIES[name], st.sampled_from([torch.float32, torch.float64]))
    def run(build: Callable[[], Case], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        case = build()
        errors = relative_errors(case, dtype, floor=0.02)
        assert max(errors.values()) <= (5e-6 if dtype == torch.float32 else 1e-12), errors

    run()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_outputs_only(name: str, dtype: torch.dtype) -> None:
    if name == "complex":
        pytest.skip("no complex half")
    torch.manual_seed(0)
    errors = relative_errors(SMALL[name](50), dtype)
    last = errors.pop("last")
    assert max(errors.values()) <= torch.finfo(dtype).eps, errors
    assert last <= 2e-6


@pytest.mark.parametrize("name", SMALL)
def test_gradcheck(name: str) -> None:
    torch.manual_seed(1)
    case = SMALL[name](5)
    names = list(case.given())
    leaves = [t.detach().clone().requires_grad_() for t in case.given().values()]
    assert torch.autograd.gradcheck(
        lambda *t: case.op(**dict(zip(names, t, strict=True)), **case.options), leaves, fast_mode=True
    )


@pytest.mark.parametrize("wide_decay", [False, True])
def test_gradient_of_strong_decays_is_exact(wide_decay: bool) -> None:
    """Where a state is all but forgotten in one step, what a step writes and reads at once doesn't drown the decay's gradient."""
    torch.manual_seed(0)
    case = gated_delta_rule(40, wide_decay=wide_decay)
    g = case.given()["g"]
    errors = relative_errors(Case(case.name, {**case.tensors, "g": torch.full_like(g, -15.0)}), torch.float32)
    assert errors["dg"] < 2e-6
