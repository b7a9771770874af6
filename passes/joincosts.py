"""Costs of joining ranges of time by summaries at one chunk length, from the derived programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from adjcomp.ir.costs import JoinCost
from adjcomp.ir.joining import CarryKind, CarryRule, DerivedProgram, JoinPrograms
from adjcomp.ir.program import Work
from adjcomp.ir.stack import Layer, Template

Seconds = Callable[[Work], float]


def join_cost(
    programs: JoinPrograms, template: Template, layer: Layer, copied: tuple[int, int], forward: Seconds, backward: Seconds
) -> JoinCost:
    """The costs of a layer's template.

    Args:
        programs: of chunks of full length.
        layer: any with this template: all hand the same states on.
        copied: bytes that are copied out of larger tensors for a tile (of sides), and for its last steps (of the stream too).
        forward, backward: what a program's work takes, one of the tile's and one of its VJP's.
    """
    tail, summarize, adjoint, tail_vjp = programs.tail, programs.summarize, programs.adjoint_summarize, programs.tail_vjp
    sizes = [math.prod(info.shape) * info.dtype.itemsize for info in layer.carries]
    whole = [size + math.prod(rule.product_shape) * rule.dtype.itemsize for size, rule in zip(sizes, programs.rules, strict=True)]
    linear = () if summarize is None else summarize.products
    back = () if adjoint is None else adjoint.products
    halos_back = () if tail_vjp is None else tuple(template.outputs[i].index for i in tail_vjp.cotangents)
    start, start_back = sum(whole[i] for i in linear), sum(whole[i] for i in back)  # zeros and units, at a range's first chunk
    return JoinCost(
        steps=programs.steps,
        halo_bytes=0 if tail is None else sum(sizes[i] for i in tail.carries),
        summary_bytes=0 if summarize is None else sum(whole[i] if i in linear else size for i, size in enumerate(sizes)),
        halo_adjoint_bytes=sum(sizes[i] for i in halos_back),
        adjoint_summary_bytes=start_back,
        tail_workspace_bytes=_workspace(tail, copied[1]),
        summarize_workspace_bytes=_workspace(summarize, copied[0] + start),
        adjoint_summarize_workspace_bytes=_workspace(adjoint, copied[0] + start_back),
        tail_vjp_workspace_bytes=_workspace(tail_vjp, copied[1]),
        tail_seconds=_seconds(tail, forward),
        summarize_seconds=_seconds(summarize, forward),
        settle_seconds=forward(_settling(programs.rules, layer, linear)) if linear else 0.0,
        adjoint_summarize_seconds=_seconds(adjoint, backward),
        adjoint_settle_seconds=backward(_settling(programs.rules, layer, back)) if back else 0.0,
        tail_vjp_seconds=_seconds(tail_vjp, backward),
    )


def _workspace(derived: DerivedProgram | None, beside: int) -> int:
    return 0 if derived is None else derived.program.workspace_bytes + beside


def _seconds(derived: DerivedProgram | None, take: Seconds) -> float:
    return 0.0 if derived is None else take(derived.program.work)


def _settling(rules: Sequence[CarryRule], layer: Layer, carries: Sequence[int]) -> Work:
    """Of applying summaries to some carries: product, end and state are read, a state is written."""
    flops = moved = 0
    for i in carries:
        size, product = math.prod(layer.carries[i].shape), math.prod(rules[i].product_shape)
        moved += (3 * size + product) * rules[i].dtype.itemsize
        flops += 2 * size * (1 if rules[i].kind is CarryKind.ELEMENTWISE else rules[i].product_shape[-1])
    return Work(flops=flops, moved_bytes=moved, kernels=len(carries))
