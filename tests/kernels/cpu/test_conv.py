"""The native convolution equals the torch form around the edges of strips, tasks, vectors and filters with code of their own."""

from __future__ import annotations

import pytest
import torch

from adjcomp.runtime.kernels.cpu import causal_conv1d, chunked_conv


@pytest.mark.parametrize("width", [1, 2, 4, 5, 64, 65])
@pytest.mark.parametrize("steps", [1, 3, 8, 9, 256, 259])
@pytest.mark.parametrize("channels", [16, 21])
def test_equals_the_torch_form(width: int, steps: int, channels: int) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, steps, channels, dtype=torch.float64)
    tail, dtail = torch.randn(2, 2, width - 1, channels, dtype=torch.float64)
    weight, bias = torch.randn(channels, width, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    for silu in (False, True):
        for given in (None, tail):
            found = causal_conv1d.causal_conv1d(x, weight, bias, given, silu)
            torch.testing.assert_close(found, chunked_conv.causal_conv1d(x, weight, bias, given, silu))
            arguments = (dy, dtail, x, weight, bias, given, silu, [True, True, True, given is not None])
            grads = causal_conv1d.causal_conv1d_vjp(*arguments)
            torch.testing.assert_close(grads, chunked_conv.causal_conv1d_vjp(*arguments))
