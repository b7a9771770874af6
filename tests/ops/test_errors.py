"""Errors name the op, the argument, what was found and what is supported, on real and on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import SMALL
from torch._subclasses.fake_tensor import FakeTensorMode

from adjcomp import ops

R = torch.randn
BAD: list[tuple[type[Exception], Callable[[], Any], list[str]]] = [
    (ValueError, lambda: ops.linear_scan(R(2, 0, 3), R(2, 0, 3)), ["linear_scan", "`a`", "(2, 0, 3)", "T >= 1"]),
    (ValueError, lambda: ops.linear_scan(R(3), R(3)), ["linear_scan", "`a`", "(B, T, *S)"]),
    (ValueError, lambda: ops.linear_scan(R(2, 5, 3), R(2, 6, 3)), ["linear_scan", "`b`", "(2, 6, 3)", "T=5"]),
    (TypeError, lambda: ops.linear_scan(torch.ones(1, 2, 3, dtype=torch.int64), R(1, 2, 3)), ["`a`", "int64", "float32"]),
    (TypeError, lambda: ops.dense_scan(R(1, 2, 3, 3), None), ["dense_scan", "`b`", "NoneType"]),
    (ValueError, lambda: ops.dense_scan(R(1, 2, 3, 4), R(1, 2, 3)), ["dense_scan", "`A`", "(1, 2, 3, 4)"]),
    (
        ValueError,
        lambda: ops.selective_scan(R(1, 4, 3), R(1, 4, 3), R(3, 2), R(1, 4, 5), R(1, 4, 2)),
        ["selective_scan", "`B`", "N=2"],
    ),
    (
        ValueError,
        lambda: ops.selective_scan(R(1, 4, 3), R(1, 4, 3), R(3, 2), R(1, 4, 2), R(1, 4, 2), z=R(1, 3, 3)),
        ["`z`", "T=4"],
    ),
    (ValueError, lambda: ops.ssd(R(1, 4, 3, 2), R(1, 4, 3), R(3), R(1, 4, 2, 5), R(1, 4, 2, 5)), ["ssd", "`B`", "divides"]),
    (
        ValueError,
        lambda: ops.ssd(R(1, 4, 2, 2), R(1, 4, 2), R(2), R(1, 4, 2, 5), R(1, 4, 2, 5), dt_limit=(1.0, 0.0)),
        ["`dt_limit`", "low"],
    ),
    (ValueError, lambda: ops.causal_conv1d(R(1, 4, 3), R(3, 4), tail=R(1, 2, 3)), ["causal_conv1d", "`tail`", "W-1=3"]),
    (ValueError, lambda: ops.causal_conv1d(R(1, 4, 3), R(3, 4), activation="gelu"), ["`activation`", "'gelu'", '"silu"']),
    (
        ValueError,
        lambda: ops.gated_delta_rule(R(1, 4, 2, 3), R(1, 4, 2, 3), R(1, 4, 2, 5), R(1, 4), R(1, 4, 2)),
        ["`g`", "(1, 4)"],
    ),
    (TypeError, lambda: ops.linear_cross_entropy(R(1, 4, 2), R(7, 2), R(1, 4)), ["linear_cross_entropy", "`labels`", "int64"]),
]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("index", range(len(BAD)))
def test_the_message_says_what_and_why(index: int, fake: bool) -> None:
    error, call, words = BAD[index]
    with FakeTensorMode() if fake else contextlib.nullcontext(), pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", SMALL)
def test_zero_steps_are_refused(name: str) -> None:
    case = SMALL[name](3)
    args = {k: t[:, :0] if k in case.timed else t for k, t in case.given().items()}
    with pytest.raises(ValueError, match="T >= 1"):
        case.op(**args, **case.options)


def test_devices_must_match() -> None:
    with pytest.raises(ValueError, match=r"`b` is on meta; supported: the device of `a`, cpu"):
        ops.linear_scan(R(1, 2, 3), torch.empty(1, 2, 3, device="meta"))
