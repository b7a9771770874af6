"""Ways to look back a fixed number of steps: each becomes a carried op, exact for every chunk length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fidelity import Block, Residual, compare, tokens
from torch import Tensor, nn
from torch.nn import functional

import adjcomp

WIDTH = 6


class Window(nn.Module):
    """Mixes its input with something earlier, then a block."""

    def __init__(self, look: Callable[[Window, Tensor], Tensor], **conv: int) -> None:
        super().__init__()
        self.look, self.block, self.scale = look, Block(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.first = nn.Parameter(torch.rand(1, 1, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, **conv) if conv else None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.look(self, x) * self.scale)


def cut_convolution(window: Window, x: Tensor) -> Tensor:
    return window.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def padded_convolution(window: Window, x: Tensor) -> Tensor:
    return window.conv(functional.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)


def token_shift(_: Window, x: Tensor) -> Tensor:
    return nn.ZeroPad2d((0, 0, 1, -1))(x)


def shift_of_a_part(_: Window, x: Tensor) -> Tensor:
    return functional.pad(x[:, :-2], (0, 0, 2, 0))


def shift_with_zeros(_: Window, x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def shift_with_a_learned_start(window: Window, x: Tensor) -> Tensor:
    return torch.cat([window.first.expand(x.shape[0], -1, -1), x[:, :-1]], 1)


def shift_of_heads(_: Window, x: Tensor) -> Tensor:
    return functional.pad(x.view(x.shape[0], x.shape[1], 2, 3), (0, 0, 0, 0, 1, -1)).flatten(2)


def running_sum(_: Window, x: Tensor) -> Tensor:
    return x.cumsum(1) / 8


WINDOWS = {
    "depthwise": (cut_convolution, {"padding": 3, "groups": WIDTH}),
    "dilated": (cut_convolution, {"padding": 6, "groups": WIDTH, "dilation": 2}),
    "delayed": (cut_convolution, {"padding": 5, "groups": WIDTH}),
    "dense": (cut_convolution, {"padding": 3}),
    "grouped": (cut_convolution, {"padding": 3, "groups": 2}),
    "padded": (padded_convolution, {"groups": WIDTH}),
    "token shift": (token_shift, {}),
    "shift of a part": (shift_of_a_part, {}),
    "shift with zeros": (shift_with_zeros, {}),
    "shift with a learned start": (shift_with_a_learned_start, {}),
    "shift of heads": (shift_of_heads, {}),
    "running sum": (running_sum, {}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_exact_for_every_chunk_length(name: str) -> None:
    look, conv = WINDOWS[name]
    torch.manual_seed(0)
    model = Residual([Window(look, **conv)], WIDTH).double()
    for chunk in (1, 4):
        compare(model, adjcomp.compile(model, chunk=chunk), lambda m: m(tokens(2, 13, vocab=31)).square().mean(), 1e-10)


def test_a_convolution_that_looks_ahead_is_refused() -> None:
    model = Residual([Window(lambda w, x: w.conv(x.transpose(1, 2)).transpose(1, 2), padding="same", groups=WIDTH)], WIDTH)
    with pytest.raises(adjcomp.CaptureError, match="looks ahead"):
        adjcomp.compile(model)(tokens(2, 13, vocab=31))
