"""The bridge to autograd: one Function a call, so that hooks, accumulation, scaling and DDP work as with any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from adjcomp.attempts import Attempts
from adjcomp.casting import recorded_casts
from adjcomp.runtime.values import Cotangents

Tensor = torch.Tensor


@dataclass
class Call:
    """One call of a compiled model between its forward and its backward.

    parameters: names of those that want a gradient; sides, initial: indices likewise. versions: what must not change before
        backward.
    """

    step: Attempts | None
    parameters: Sequence[str]
    sides: Sequence[int]
    initial: Sequence[int]
    versions: Mapping[str, tuple[Tensor, int]]
    on_backward: Callable[[], AbstractContextManager[None]]

    def check_unchanged(self) -> None:
        """RuntimeError naming the parameter, buffer or input that was changed in place since the forward."""
        for name, (tensor, version) in self.versions.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"{name} was changed in place between forward and backward (version {version} -> {tensor._version}): "
                    "the backward would recompute with other values. Call backward() first, or run the forward again"
                )


class Bridge(torch.autograd.Function):
    """Leaves (parameters, sides, initial states) -> sums, per-token outputs, final states."""

    @staticmethod
    def forward(ctx: Any, call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        assert call.step is not None
        outputs = call.step.forward()
        # Tensors of their own: what the step holds must not point back to this call, or a dropped result waits for the collector.
        results = tuple(t.detach() for t in (*outputs.sums, *outputs.outs, *outputs.finals))
        ctx.counts = (len(outputs.sums), len(outputs.outs))
        ctx.leaf_dtypes = [leaf.dtype for leaf in leaves]
        ctx.mark_non_differentiable(*(t for t in results if not (t.is_floating_point() or t.is_complex())))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if call.step is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a compiled model frees what it kept as its backward runs, "
                "and retain_graph=True can't bring it back. Run the forward again"
            )
        call.check_unchanged()
        step, call.step = call.step, None
        sums, outs = ctx.counts
        with call.on_backward(), recorded_casts():
            grads = step.backward(Cotangents(cotangents[:sums], cotangents[sums : sums + outs], cotangents[sums + outs :]))
        found: list[Tensor | None] = [grads.parameters.pop(name) for name in call.parameters]
        found += [grads.sides[i] for i in call.sides]
        found += [grads.initial[i] for i in call.initial]
        for i, dtype in enumerate(ctx.leaf_dtypes):
            grad = found[i]
            if grad is not None and grad.dtype is not dtype:
                found[i] = grad.to(dtype)
        return (None, *found)
