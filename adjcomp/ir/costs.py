"""What a tile costs: bytes and seconds of each layer's tile at one chunk length.

Layers are numbered 0 (stem), 1 … K (residual layers), K + 1 (head and loss). Chunks are numbered 0 … C - 1 along time; all
chunks but the last have the same length. `passes.cost` fills these tables in; the scheduler, the verifier and the printed
plan read them. All bytes are storages counted once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileCost:
    """Bytes, FLOPs and seconds of one tile (layer k, chunk c).

    A `workspace` is the extra peak while the action runs, over everything that was live when it started; the values that the
    action writes are part of it. The adjoint owns `keep[k,c]` and `g[k,c]` and releases each as soon as it is consumed.
    """

    name: str  # the layer's name in the model, e.g. "backbone.layers.3"
    stream_bytes: int  # x[k,c], the residual chunk that the tile writes; 0 for the head
    carry_bytes: int  # s[k,c], the state (and convolution tail) that the tile hands to chunk c + 1
    keep_bytes: int  # keep[k,c], the internals its VJP needs, without x[k-1,c], x[k,c], s[k,c-1] and parameters
    cotangent_bytes: int  # g[k,c], the cotangent of x[k,c]; 0 for the head
    adjoint_bytes: int  # λ[k,c], the cotangent of s[k,c]
    forward_workspace_bytes: int  # Forward or Recompute without keep
    keep_workspace_bytes: int  # Forward or Recompute with keep
    adjoint_workspace_bytes: int  # Adjoint (or HeadVjp for the head)
    forward_seconds: float
    keep_seconds: float
    adjoint_seconds: float
    forward_flops: int
    adjoint_flops: int
    reads_input: bool  # the VJP reads x[k-1,c]
    reads_output: bool  # the VJP reads x[k,c]
    reads_carry: bool  # the VJP reads s[k,c-1]
    has_vjp: bool  # False when nothing at or below this layer takes a gradient
    passes_cotangent: bool  # the VJP writes g[k-1,c]; False where nothing below takes a gradient, and for the stem
    reads_past: bool = False  # the tile reads keys and values of all chunks before, and its VJP the cotangents that come back
    narrow_bytes: int = 0  # n[k,c], the state rounded to bfloat16; 0 where that takes no less than s[k,c]


@dataclass(frozen=True)
class JoinCost:
    """What joins ranges of time in one layer by summaries: bytes, workspaces and seconds, at chunks of full length.

    A *halo* is the part of the state that the last `steps` steps of a range make whatever comes in; the rest is *linear*: a range
    moves it by a product and adds to it. A layer without a state has neither.
    """

    steps: int  # that halos look back
    halo_bytes: int  # halo[k,c], the state's halos; 0 where it has none
    summary_bytes: int  # sum[k,c]: the state that a range would leave from nothing, and its products; 0 where all is halo
    halo_adjoint_bytes: int  # ghalo[k,c], the cotangent of halo[k,c]; 0 where none is wanted
    adjoint_summary_bytes: int  # asum[k,c]: the adjoint state likewise, and its products; 0 where no linear state takes one
    tail_workspace_bytes: int
    summarize_workspace_bytes: int
    adjoint_summarize_workspace_bytes: int
    tail_vjp_workspace_bytes: int
    tail_seconds: float
    summarize_seconds: float
    settle_seconds: float  # of applying a summary to a state
    adjoint_summarize_seconds: float
    adjoint_settle_seconds: float
    tail_vjp_seconds: float


@dataclass(frozen=True)
class Tie:
    """Trained parameters that several layers share, such as an embedding that is the head's matrix too."""

    layers: tuple[int, ...]  # lowest first
    gradient_bytes: int  # of their accumulators


@dataclass(frozen=True)
class Gradient:
    """Gradients that come and go together: of the parameters that one layer has alone, or that the same layers share."""

    layers: tuple[int, ...]  # whose VJPs add to them, lowest first
    accumulator_bytes: int  # from the first VJP of one of the layers to the last publication
    published_bytes: int  # from then on, in the dtype of the parameters


@dataclass(frozen=True)
class StackCosts:
    """Costs of a whole stack cut into chunks of one length, and what is live outside of the tiles.

    `resident_bytes` is live during the whole step, by kind ("parameters", "buffers", "inputs", "optimizer", "outputs", …);
    `turn_bytes` is allocated when the backward starts and stays until its end, by kind ("gradients", "output cotangents");
    where `gradients` are known, those of a plan for one device come with the first VJP and change with the last publication.
    `publish_bytes[k]` is the extra peak of handing layer k's gradients to autograd (a cast to the parameter's dtype).
    """

    seq_len: int  # tokens along time
    chunk: int  # chunk length, tokens
    chunk_count: int  # C = ceil(seq_len / chunk)
    layers: tuple[TileCost, ...]  # index k, for chunks 0 … C - 2
    last_layers: tuple[TileCost, ...]  # index k, for chunk C - 1, whose length is seq_len - (C - 1) * chunk
    resident_bytes: dict[str, int]
    turn_bytes: dict[str, int]
    publish_bytes: tuple[int, ...]
    keeps: str = "lean"  # what keep[k,c] holds: "lean" (what is dear to make) or "full" (everything the VJP reads)
    ties: tuple[Tie, ...] = ()  # parameters that several layers share
    coupling: str = "exact"  # "residual": layer inputs are constants of the backward, an approximation
    adjoint_window: int | None = None  # steps that an output's adjoint reaches back; None: all, as backpropagation does
    shares_cotangent: bool = False  # residual coupling: every layer's VJP reads g[K,c], the one that the head makes
    shared_sides: tuple[tuple[int, ...], ...] = ()  # sets of layers that add to the gradient of one side input
    joins: tuple[JoinCost, ...] = ()  # by layer; none where ranges of time can't be joined by summaries
    gradients: tuple[Gradient, ...] = ()  # all that are wanted, for plans of one device; none: they are all there from the Turn

    def tile(self, layer: int, chunk: int) -> TileCost:
        """The cost of tile (layer, chunk)."""
        table = self.last_layers if chunk == self.chunk_count - 1 else self.layers
        return table[layer]

    @property
    def head(self) -> int:
        """Index of the head, K + 1."""
        return len(self.layers) - 1

    def cotangent_of(self, layer: int) -> int:
        """The k of the g[k,c] that the VJP of `layer` reads: its own, or the stream's last where all layers read that."""
        return self.head - 1 if self.shares_cotangent else layer

    def makes_cotangent(self, layer: int, chunk: int) -> bool:
        """Whether the VJP of a tile writes g[layer-1,chunk]."""
        return self.tile(layer, chunk).passes_cotangent and layer > 0 and (layer == self.head or not self.shares_cotangent)
