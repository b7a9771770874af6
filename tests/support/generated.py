"""Strategies for models: random residual stacks as printable descriptions, and random calls of them.

A description is data: Hypothesis shrinks it and prints it, `build` makes the model, always with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import adjcomp

MIXERS = ("diagonal", "selective", "ssd", "complex", "conv", "shift", "cumsum", "delta")
NORMS = ("layer", "rms", "none")


@dataclass(frozen=True)
class BlockSpec:
    """One residual block: x + gate · mixer(norm(x)), then x + mlp(x)."""

    mixer: str = "diagonal"
    norm: str = "layer"
    gate: bool = False
    mlp: bool = False
    dropout: bool = False
    in_place: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class StackSpec:
    """A stack: token ids (vocab) or float sequences in; logits, a mean of squares or a cross-entropy out."""

    blocks: tuple[BlockSpec, ...]
    width: int = 4
    tokens: bool = True
    tied: bool = False
    shared: bool = False
    loss: str = "outer"


@dataclass(frozen=True)
class CallSpec:
    """Shape, seed and chunk length of one call."""

    batch: int = 1
    length: int = 8
    seed: int = 0
    chunk: int | None = 3


VOCAB = 11


class Mixer(nn.Module):
    """One of the ways to mix along time."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        sizes = {"selective": width + 6, "ssd": width + 2 + 4, "delta": 4 * width + 4, "complex": 2 * width}
        self.maps = nn.Linear(width, sizes.get(kind, width))
        self.decay = nn.Parameter(torch.rand(width, 3) + 0.1)
        if kind == "conv":
            self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.kind}")(x, self.maps(x))

    def _diagonal(self, x: Tensor, u: Tensor) -> Tensor:
        driven = u.unsqueeze(-1) * self.decay
        h, _ = adjcomp.ops.linear_scan(torch.sigmoid(self.decay).expand_as(driven), driven)
        return h.sum(-1)

    def _selective(self, x: Tensor, u: Tensor) -> Tensor:
        dt, B, C = u.split([self.width, 3, 3], -1)
        return adjcomp.ops.selective_scan(x, dt, -self.decay, B, C, self.decay[:, 0], dt_softplus=True)[0]

    def _ssd(self, x: Tensor, u: Tensor) -> Tensor:
        v, dt, B, C = u.split([self.width, 2, 2, 2], -1)
        heads = v.unflatten(-1, (2, self.width // 2))
        y, _ = adjcomp.ops.ssd(heads, dt, -self.decay[:2, 0], B.unsqueeze(2), C.unsqueeze(2), dt_softplus=True)
        return y.flatten(2)

    def _complex(self, x: Tensor, u: Tensor) -> Tensor:
        real, imag = u.chunk(2, -1)
        turning = torch.polar(torch.exp(-self.decay[:, 0]), self.decay[:, 1])
        h, _ = adjcomp.ops.linear_scan(turning.expand(*real.shape), torch.complex(real, imag))
        return h.real + 0.5 * h.imag

    def _delta(self, x: Tensor, u: Tensor) -> Tensor:
        q, k, v, _, g, beta = u.split([self.width, self.width, self.width, self.width, 2, 2], -1)
        q, k, v = (t.unflatten(-1, (2, self.width // 2)) for t in (q, k, v))
        q, k = (functional.normalize(t, dim=-1) for t in (q, k))
        y, _ = adjcomp.ops.gated_delta_rule(q, k, v, functional.logsigmoid(g), torch.sigmoid(beta))
        return y.flatten(2)

    def _conv(self, x: Tensor, u: Tensor) -> Tensor:
        return self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    def _shift(self, x: Tensor, u: Tensor) -> Tensor:
        return functional.pad(u, (0, 0, 1, -1)) * self.decay[:, 0] + u

    def _cumsum(self, x: Tensor, u: Tensor) -> Tensor:
        return u.cumsum(1) * 0.1


class RMS(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class GeneratedBlock(nn.Module):
    """The module of a BlockSpec."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.norm = {"layer": nn.LayerNorm(width), "rms": RMS(), "none": nn.Identity()}[spec.norm]
        self.mixer = Mixer(spec.mixer, width)
        self.gate = nn.Linear(width, width) if spec.gate else None
        self.mlp = (
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(inplace=spec.in_place), nn.Linear(2 * width, width))
            if spec.mlp
            else None
        )
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3 if spec.dropout else 0.0)
        self.requires_grad_(not spec.frozen)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        y = self.mixer(u)
        if self.gate is not None:
            y = y * functional.silu(self.gate(u))
        y = self.dropout(self.out(y))
        x = y.add_(x) if self.spec.in_place and not self.spec.dropout else x + y
        return x if self.mlp is None else x + self.mlp(x)


class GeneratedStack(nn.Module):
    """The module of a StackSpec."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(VOCAB, spec.width) if spec.tokens else nn.Linear(spec.width, spec.width)
        self.layers = nn.ModuleList(GeneratedBlock(block, spec.width) for block in spec.blocks)
        if spec.shared and len(self.layers) > 1:
            self.layers[-1] = self.layers[0]
        self.head = nn.Linear(spec.width, VOCAB, bias=False)
        if spec.tied and spec.tokens:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        match self.spec.loss:
            case "shifted":
                return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            case "labels":
                return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            case "mean":
                return logits.square().mean()
        return logits


def build(spec: StackSpec, dtype: torch.dtype = torch.float64) -> GeneratedStack:
    """The model of a description, the same weights every time."""
    torch.manual_seed(0)
    return GeneratedStack(spec).to(dtype)


def inputs_of(spec: StackSpec, call: CallSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence, ids to be used as labels, and weights (B, T, vocabulary) for a loss on logits, from the call alone."""
    generator = torch.Generator().manual_seed(call.seed)
    ids = torch.randint(0, VOCAB, (call.batch, call.length), generator=generator)
    x = ids if spec.tokens else torch.randn(call.batch, call.length, spec.width, generator=generator, dtype=dtype)
    return x, ids, torch.randn(call.batch, call.length, VOCAB, generator=generator, dtype=dtype)


def call_of(spec: StackSpec, call: CallSpec, dtype: torch.dtype = torch.float64) -> Callable[[nn.Module], Tensor]:
    """From a model to a scalar loss, on inputs that depend on the call alone."""
    x, ids, weights = inputs_of(spec, call, dtype)

    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(call.seed)
        if spec.loss in ("shifted", "labels"):
            return model(x, ids)
        out = model(x)
        return out if spec.loss == "mean" else (out * weights).sum()

    return run


def blocks(*, dropout: bool = False) -> st.SearchStrategy[BlockSpec]:
    """Random blocks; all with dropout, or none."""
    flags = st.booleans()
    return st.builds(
        BlockSpec,
        st.sampled_from(MIXERS),
        st.sampled_from(NORMS),
        gate=flags,
        mlp=flags,
        dropout=st.just(dropout),
        in_place=flags,
        frozen=st.just(False) if dropout else st.sampled_from([False, False, False, True]),
    )


def stacks(*, dropout: bool = False) -> st.SearchStrategy[StackSpec]:
    """Random stacks of one to three blocks."""
    flags = st.booleans()
    return st.builds(
        StackSpec,
        st.lists(blocks(dropout=dropout), min_size=1, max_size=3).map(tuple),
        width=st.sampled_from([4, 6]),
        tokens=flags,
        tied=flags,
        shared=flags,
        loss=st.sampled_from(["outer", "mean", "labels", "shifted"]),
    )


def calls(longest: int = 24) -> st.SearchStrategy[CallSpec]:
    """Random shapes and chunk lengths; a length of at least two, for losses that predict the next token."""
    chunk = st.one_of(st.none(), st.integers(1, 9))
    return st.builds(CallSpec, st.integers(1, 3), st.integers(2, longest), st.integers(0, 3), chunk)
