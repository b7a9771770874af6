"""Small stacks whose layers carry states of every kind; and some whose ranges of time don't join."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from adjcomp import ops


class Stack(nn.Module):
    """Residual layers of width 4 between linear maps, float64; `weights` (B, T, 4) enter the `Weighted` ones."""

    def __init__(self, *layers: Callable[[int], nn.Module], width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(layer(width) for layer in layers)
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + (layer(x, weights) if isinstance(layer, Weighted) else layer(x))
        return self.head(x)


def causal(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution over the steps before, (B, T, D)."""
    return conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def taps(width: int, steps: int) -> nn.Conv1d:
    """Weights of `causal`, for each channel its own."""
    return nn.Conv1d(width, width, steps, groups=width, padding=steps - 1)


class Dense(nn.Module):
    """A full matrix per step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix, self.inputs = nn.Linear(width, width * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        matrices = 0.5 * torch.tanh(self.matrix(x)).unflatten(-1, (x.shape[-1], x.shape[-1]))
        return ops.dense_scan(matrices, self.inputs(x))[0]


class GatedRecurrence(nn.Module):
    """A convolution, then a recurrence whose decay and input are gated, beside a branch of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(width, width) for name in ("branch", "x", "decay", "input", "out")})
        self.conv, self.rate = taps(width, 4), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        u = causal(self.conv, self.maps["x"](x))
        log = -8 * torch.sigmoid(self.maps["decay"](u)) * functional.softplus(self.rate)
        driven = torch.sqrt(1 - torch.exp(2 * log) + 1e-6) * torch.sigmoid(self.maps["input"](u)) * u
        h, _ = ops.linear_scan(torch.exp(log), driven)
        return self.maps["out"](h * functional.gelu(self.maps["branch"](x)))


class ShiftedScan(nn.Module):
    """A token shift, then a recurrence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(width))
        self.maps = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + (functional.pad(x, (0, 0, 1, -1)) - x) * self.mix
        decay, key, value, gate = self.maps(mixed).chunk(4, -1)
        h, _ = ops.linear_scan(torch.sigmoid(decay), key * value)
        return torch.sigmoid(gate) * h


class TwoWindows(nn.Module):
    """Two convolutions in a row, and a scan of what they make; a gate beside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps, self.decay = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.convs = nn.ModuleList([taps(width, 3), taps(width, 4)])

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.maps(x).chunk(2, -1)
        for conv in self.convs:
            u = functional.silu(causal(conv, u))
        h, _ = ops.linear_scan(torch.sigmoid(self.decay(u)), u)
        return h * functional.silu(gate)


class Siblings(nn.Module):
    """Two recurrences beside one another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.maps(x).chunk(3, -1)
        return ops.linear_scan(torch.sigmoid(a), b)[0] * ops.linear_scan(torch.sigmoid(c), a * b)[0]


class ReadBySibling(nn.Module):
    """A recurrence that is read by what another one makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps, self.read, self.rate = nn.Linear(width, 3 * width), nn.Linear(width, 3), nn.Parameter(torch.rand(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.maps(x).chunk(3, -1)
        h, _ = ops.linear_scan(torch.sigmoid(a), b)
        return ops.selective_scan(b, c, -self.rate, self.read(b), self.read(h), dt_softplus=True)[0]


class Weighted(nn.Module):
    """A value from the side enters convolution and recurrence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.maps = taps(width, 3), nn.Linear(width, width)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        u = causal(self.conv, self.maps(x) * weights)
        return ops.linear_scan(torch.sigmoid(self.maps(u)), u * weights)[0]


class Unread(nn.Module):
    """The steps of a recurrence that takes no part in what comes out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps, self.conv = nn.Linear(width, 2 * width), taps(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.maps(x).chunk(2, -1)
        h, _ = ops.linear_scan(torch.sigmoid(a), b)
        return causal(self.conv, b) + 0.0 * h.detach()


JOINABLE = {
    kind.__name__: kind for kind in (Dense, GatedRecurrence, ShiftedScan, TwoWindows, Siblings, ReadBySibling, Weighted, Unread)
}


class Chained(nn.Module):
    """A recurrence whose decay is what another one makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.maps(x).chunk(3, -1)
        return ops.linear_scan(torch.sigmoid(ops.linear_scan(torch.sigmoid(a), b)[0]), c)[0]


class WindowAfter(nn.Module):
    """A convolution of what a recurrence makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.maps = taps(width, 3), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.maps(x).chunk(2, -1)
        return causal(self.conv, ops.linear_scan(torch.sigmoid(a), b)[0])
