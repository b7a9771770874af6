"""Time sharding: from a traced model to a ResidualStack of tile functions, with what stands around them.

The prologue makes what tiles read from the side (shifted labels, masks) and initial states, for the whole sequence at once; the
epilogue finishes the model's outputs from partial sums and per-token outputs. Both run under plain autograd.
"""

from __future__ import annotations

from torch import fx

from adjcomp.ir.stack import OutInfo, ResidualStack, SideInfo, SumInfo, TimeAxis
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.passes.capture import TracedModel
from adjcomp.passes.outputs import find_outputs
from adjcomp.passes.outside import build_epilogue, build_prologue
from adjcomp.passes.tiles import bind_layers, build_tile
from adjcomp.passes.timeaxis import TimeLayout, time_factor
from adjcomp.passes.whole import Trainable, Whole, analyse

__all__ = ["Trainable", "shard"]


def shard(traced: TracedModel, trainable: Trainable, variant: Variant = EXACT) -> ResidualStack:
    """Cut a traced model into tile functions. Raises CaptureError naming module, op and source line of what cannot be cut."""
    whole = analyse(traced, trainable)
    find_outputs(whole)
    tiles = [build_tile(whole, k) for k in range(len(whole.cut.borders) + 1)]
    layers, templates = bind_layers(whole, tiles, variant)
    return ResidualStack(
        layers=layers,
        templates=templates,
        sides=tuple(SideInfo(_axis(whole.times[n].layout), n in whole.grad_nodes) for n in whole.sides),
        outs=tuple(_out_info(n, whole) for n in whole.outs),
        sums=tuple(SumInfo(tuple(p.shape), p.dtype) for p in whole.sums),
        prologue=build_prologue(whole),
        epilogue=build_epilogue(whole),
        initial_count=len(whole.initial),
        final_count=len(whole.finals),
        dropped_outputs=whole.dropped_outputs(),
        updates=whole.updates,
        placeholder_names=(*traced.parameter_names, *traced.buffer_names, *(i.path for i in traced.inputs)),
        variant=variant,
    )


def _axis(layout: TimeLayout | None) -> TimeAxis | None:
    return None if layout is None else TimeAxis(layout.dim, layout.outer, layout.inner)


def _out_info(node: fx.Node, whole: Whole) -> OutInfo:
    layout = whole.times[node].layout
    value = node.meta["val"]
    shape = tuple(None if time_factor(s, whole.traced.time) else int(s) for s in value.shape)
    assert layout is not None
    return OutInfo(shape, value.dtype, TimeAxis(layout.dim, layout.outer, layout.inner))
