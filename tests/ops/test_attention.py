"""Causal attention against its float64 reference: any sizes, grouped heads, windows, and however the sequence is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adjcomp import ops
from adjcomp.ops import reference


def _inputs(steps: int, heads: int, groups: int, width: int, values: int, batch: int = 2) -> list[Tensor]:
    shapes = [(heads, width), (groups, width), (groups, values)]
    return [torch.randn(batch, steps, *shape, dtype=torch.float64) for shape in shapes]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / (expected.norm() + 1e-30))


def _run(leaves: list[Tensor], dy: Tensor, function: object, **options: object) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = function(*leaves, **options)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@given(
    st.integers(1, 70), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9),
    st.none() | st.integers(1, 90), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_any_shape_past_and_window(
    steps: int, past: int, groups: int, share: int, width: int, values: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, v = _inputs(past + steps, groups * share, groups, width, values)
    leaves = [q[:, past:], k[:, past:], v[:, past:], k[:, :past], v[:, :past]]
    dy = torch.randn(*q[:, past:].shape[:3], values, dtype=torch.float64)
    expected = _run(leaves, dy, reference.causal_attention, window=window)
    found = _run([t.to(dtype) for t in leaves], dy, ops.causal_attention, window=window)
    bound = 1e-12 if dtype is torch.float64 else 2e-5
    scale = max(float(e.norm()) for e in expected[1:])
    for f, e in zip(found, expected, strict=True):
        assert float((f.double() - e).norm()) <= bound * (float(e.norm()) + 0.1 * scale)


@pytest.mark.parametrize("cuts", [(1, 1, 1, 40), (7,) * 6, (20, 23), (43,)])
@pytest.mark.parametrize("window", [None, 9])
def test_chunks_add_up_to_the_whole_sequence(cuts: tuple[int, ...], window: int | None) -> None:
    torch.manual_seed(0)
    steps = sum(cuts)
    q, k, v = _inputs(steps, 4, 2, 6, 6)
    dy = torch.randn(2, steps, 4, 6, dtype=torch.float64)
    y, *expected = _run([q, k, v], dy, ops.causal_attention, window=window)
    found = [torch.zeros_like(t) for t in (q, k, v)]
    for start, stop in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
        leaves = [*(t[:, start:stop] for t in (q, k, v)), k[:, :start], v[:, :start]]
        part, *grads = _run(leaves, dy[:, start:stop], ops.causal_attention, window=window)
        assert _error(part, y[:, start:stop]) <= 1e-13
        for total, grad, span in zip([*found, *found[1:]], grads, [slice(start, stop)] * 3 + [slice(0, start)] * 2, strict=True):
            total[:, span] += grad
    assert all(_error(f, e) <= 1e-13 for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_outputs_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (t.to(dtype).double() for t in _inputs(60, 4, 2, 8, 8))
    leaves = [q[:, 30:], k[:, 30:], v[:, 30:], k[:, :30], v[:, :30]]
    dy = torch.randn(2, 30, 4, 8, dtype=torch.float64).to(dtype).double()
    expected = _run(leaves, dy, reference.causal_attention)
    found = _run([t.to(dtype) for t in leaves], dy, ops.causal_attention)
    assert max(map(_error, found, expected)) <= torch.finfo(dtype).eps


def test_scores_are_scaled_as_asked_and_by_the_width_otherwise() -> None:
    q, k, v = _inputs(5, 2, 1, 4, 4)
    assert torch.allclose(ops.causal_attention(q, k, v), ops.causal_attention(q, k, v, scale=0.5))
    assert torch.allclose(ops.causal_attention(q, k, v, scale=2.0), reference.causal_attention(q, k, v, scale=2.0))


def test_the_blocks_of_other_devices_give_what_the_fused_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from adjcomp.runtime.kernels import attention

    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    monkeypatch.setattr(attention, "KEY_BLOCK", 16)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 500)
    torch.manual_seed(0)
    q, k, v = _inputs(61, 4, 2, 6, 5)
    leaves = [q[:, 30:], k[:, 30:], v[:, 30:], k[:, :30], v[:, :30]]
    dy = torch.randn(2, 31, 4, 5, dtype=torch.float64)
    for window in (None, 20):
        expected = _run(leaves, dy, reference.causal_attention, window=window)
        for device in ("cpu", "accelerator"):
            monkeypatch.setattr(attention, "_has_fused", lambda tensor, device=device: device == "cpu")
            found = _run(leaves, dy, ops.causal_attention, window=window)
            assert max(map(_error, found, expected)) <= 1e-13


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": (2, 5, 3, 4), "v": (2, 5, 3, 4)}, "divides"),
        ({"v": (2, 4, 2, 4)}, "argument `v`"),
        ({"past_k": (2, 3, 2, 4)}, "past_v"),
        ({"window": 0}, "window"),
        ({"q": (2, 0, 4, 4), "k": (2, 0, 2, 4), "v": (2, 0, 2, 4)}, "T >= 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], words: str) -> None:
    shapes = {"q": (2, 5, 4, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 4)} | change
    given = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in shapes.items()}
    with pytest.raises(ValueError, match=words):
        ops.causal_attention(**given)  # type: ignore[arg-type]
