"""The residual stack: a model cut into a stem, layers and a head, each a function that runs on one chunk of time.

A tile function has the signature `(parameters, streams, sides, carries, …) -> (streams, carries, outs, sums)`: the residual chunk
and the state left by the chunk before come in, the next chunk and state go out. `outs` are per-token outputs of the model, `sums`
are partial sums over time (a loss) that are added up over chunks. Keys and values of attention are not handed on but kept over
the whole sequence: each tile adds those of its chunk, and reads those of all chunks before. What no chunk can compute alone
stands around the tiles: the prologue makes whole-sequence sides (shifted labels, masks) and initial states, the epilogue turns
sums and outs into the model's outputs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from adjcomp.ir.variant import EXACT, Variant


class InputKind(enum.Enum):
    """What a placeholder of a tile function takes."""

    PARAMETER = "parameter"  # a parameter or buffer of the model
    STREAM = "stream"  # x[k-1,c]
    SIDE = "side"  # a chunk of a side value, or a side value without time
    CARRY = "carry"  # one tensor of s[k,c-1]
    SEED = "seed"  # the step's random seed mixed with the layer's index: int64 scalar
    OFFSET = "offset"  # the chunk's first time step: int64 scalar
    PAST = "past"  # keys or values of all steps before the chunk: (B, steps, …)


class OutputKind(enum.Enum):
    """What an output of a tile function is."""

    STREAM = "stream"  # x[k,c]
    CARRY = "carry"  # one tensor of s[k,c]
    OUT = "out"  # a chunk of a per-token output
    SUM = "sum"  # a partial sum over time
    STORED = "stored"  # the chunk's keys or values: (B, steps, …)


@dataclass(frozen=True)
class TileInput:
    """One placeholder; `index` counts within its kind."""

    kind: InputKind
    index: int
    differentiable: bool = False  # whether a gradient with respect to it is wanted


@dataclass(frozen=True)
class TileOutput:
    """One output; `index` counts within its kind; `differentiable` says whether a cotangent may come in for it."""

    kind: OutputKind
    index: int
    differentiable: bool = True


@dataclass(frozen=True)
class Template:
    """A tile function, shared by all layers with an equal graph.

    graph: ATen nodes over one symbol for the chunk length; `meta["val"]` on every node. key: its canonical text. window: steps
    that the adjoint of an output reaches back in this tile's recurrences; None for all.
    """

    graph: fx.GraphModule
    inputs: tuple[TileInput, ...]
    outputs: tuple[TileOutput, ...]
    time: Any
    key: str
    window: int | None = None


@dataclass(frozen=True)
class TimeAxis:
    """Where time is in a whole-sequence tensor: dimension `dim` has size outer · T · inner."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class CarryInfo:
    """One tensor of a layer's state: its shape and dtype; `initial` indexes the prologue's outputs (None: zeros).

    windowed: shape of the adjoint state under a window: (batch, state + (window - 1) · features), the cotangent of the state
    before the chunk and what the window needs of the steps after it. None without a window: then the adjoint state is like the
    state.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: int | None
    final: int | None  # index among the epilogue's final states; None when the model does not return it
    windowed: tuple[int, ...] | None = None

    @property
    def adjoint_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that travels backward in time for this state."""
        return self.shape if self.windowed is None else self.windowed


@dataclass(frozen=True)
class StoreInfo:
    """Keys or values that a layer keeps over the whole sequence: sizes without batch and time, (heads, width), and dtype.

    wanted: whether later chunks send cotangents back to them, which are added up over the same shape.
    """

    batch: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool

    def shape(self, steps: int) -> tuple[int, ...]:
        """Shape for a number of steps; time is dimension 1."""
        return (self.batch, steps, *self.sizes)


def narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a state of `dtype` is rounded to where borders are kept in lower precision: real ones to bfloat16."""
    return torch.bfloat16 if dtype in (torch.float32, torch.float64) else dtype


@dataclass(frozen=True)
class Layer:
    """One layer of the stack: a template and what its placeholders are bound to.

    parameters: names of parameters and buffers. sides: indices into `ResidualStack.sides`. outs, sums: indices into the stack's.
    stores: what it keeps over the whole sequence.
    """

    name: str
    template: int
    parameters: tuple[str, ...]
    sides: tuple[int, ...]
    carries: tuple[CarryInfo, ...]
    outs: tuple[int, ...]
    sums: tuple[int, ...]
    stores: tuple[StoreInfo, ...] = ()


@dataclass(frozen=True)
class SideInfo:
    """A whole-sequence value that tiles read: output `index` of the prologue; `axis` None: it has no time and enters whole."""

    axis: TimeAxis | None
    differentiable: bool


@dataclass(frozen=True)
class OutInfo:
    """A per-token output of the tiles, materialised over the whole sequence: shape with None for time, dtype, where time is."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    axis: TimeAxis


@dataclass(frozen=True)
class SumInfo:
    """A partial sum over time: shape and accumulation dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ResidualStack:
    """A captured model, cut.

    layers: stem first, head last. prologue: graph from the model's parameters, buffers and inputs to (sides…, initial states…).
    epilogue: graph from the same, followed by (sums…, outs…, final states…), to the model's output tensors; outputs that stand
    for a dropped value (logits beside a loss) are listed in `dropped_outputs`. Its last outputs are new values of the buffers and
    inputs that the model changes in forward, named in `updates`. variant: which gradient the tiles' VJPs compute.
    """

    layers: tuple[Layer, ...]
    templates: tuple[Template, ...]
    sides: tuple[SideInfo, ...]
    outs: tuple[OutInfo, ...]
    sums: tuple[SumInfo, ...]
    prologue: fx.GraphModule
    epilogue: fx.GraphModule
    initial_count: int
    final_count: int
    dropped_outputs: frozenset[int]
    updates: tuple[str, ...]
    placeholder_names: tuple[str, ...]  # parameters, buffers, inputs: the placeholders of prologue and epilogue
    variant: Variant = EXACT
