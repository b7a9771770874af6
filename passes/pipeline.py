"""The pipeline, in order: capture, shard, differentiate, split, cost, schedule. One callback between passes times, checks and
prints.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adjcomp.ir.stack import ResidualStack
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.passes.capture import TracedModel, capture
from adjcomp.passes.joinable import NotJoinable, joinable
from adjcomp.passes.joining import JoinGraphs, join_graphs
from adjcomp.passes.joint import JointGraph, differentiate
from adjcomp.passes.split import KeepPolicy, Split, split
from adjcomp.passes.streaming import Piece, as_piece
from adjcomp.passes.timeshard import Trainable, shard

log = logging.getLogger("adjcomp")
Observer = Callable[[str, object, float], None]


@dataclass(frozen=True)
class Captured:
    """A model cut into tiles, with the VJP of every distinct one. Good for every length that satisfies `traced.guards`."""

    traced: TracedModel
    stack: ResidualStack
    joints: tuple[JointGraph | None, ...]
    piece: Piece | None = None  # how states enter and leave, where the call is a piece of a stream

    def continued(self, *, given: bool) -> Captured:
        """The same for a piece of a stream: states leave it, and enter it where they are `given`."""
        piece = as_piece(self.stack, continued=given)
        return replace(self, stack=piece.stack, piece=piece)

    def holds_at(self, seq_len: int) -> bool:
        """Whether the model takes the captured branches at this length."""
        return all(bool(guard.xreplace({self.traced.time: seq_len})) for guard in self.traced.guards)

    def splits(self, policy: KeepPolicy) -> tuple[Split | None, ...]:
        """Each joint graph cut by a policy."""
        return tuple(None if joint is None else split(joint, policy) for joint in self.joints)

    def joins(self, splits: Sequence[Split | None]) -> tuple[JoinGraphs, ...] | NotJoinable:
        """What joins ranges of time of each template by summaries, or why they can't be."""
        found: list[JoinGraphs] = []
        if self.stack.variant.approximate:
            return NotJoinable("the gradient is an approximation")
        for template, part in zip(self.stack.templates, splits, strict=True):
            kind = joinable(template, None if part is None else part.joint)
            if isinstance(kind, NotJoinable):
                return kind
            found.append(join_graphs(kind, part))
        return tuple(found)


def run_capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    observe: Observer | None = None,
    *,
    hint: int | None = None,
    variant: Variant = EXACT,
    gradients: bool = True,
    states: bool = False,
    shapes: Mapping[str, torch.Tensor] | None = None,
) -> Captured:
    """Capture a call of a model. Raises CaptureError; the model is left as it was.

    hint: the length at which branches on the length are decided; None for a long one. variant: which gradient is wanted.
    gradients: whether anything may want one; states: whether given initial states do. shapes: meta
    tensors like the parameters and buffers, by name, of which the whole isn't here.
    """
    note = observe or _observe
    started = time.perf_counter()

    def done(name: str, result: object) -> None:
        nonlocal started
        note(name, result, time.perf_counter() - started)
        started = time.perf_counter()

    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # not those of a checkpoint around the call
        traced = capture(model, args, kwargs, hint, shapes)
        done("capture", traced.graph.graph)
        wanted = trainable(model, traced, args, kwargs) if gradients else Trainable(frozenset(), frozenset())
        stack = shard(traced, replace(wanted, states=states), variant)
        done("timeshard", stack)
        joints = tuple(differentiate(template) for template in stack.templates)
        done("differentiate", joints)
    return Captured(traced, stack, joints)


def trainable(model: torch.nn.Module, traced: TracedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trainable:
    """Which parameters and inputs want a gradient in this call."""
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    paths = [entry.path for entry, tensor in zip(traced.inputs, tensors, strict=True) if tensor.requires_grad]
    return Trainable(frozenset(n for n, p in model.named_parameters() if p.requires_grad), frozenset(paths))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _observe(name: str, result: object, seconds: float) -> None:
    log.info("%s took %.2f s", name, seconds)
    if os.environ.get("ADJCOMP_DEBUG"):
        log.warning("after %s:\n%s", name, result)
