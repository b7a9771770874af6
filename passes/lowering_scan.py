"""torch's `associative_scan` in terms of `adjcomp.ops.linear_scan`, where what it combines is a linear recurrence.

The scan takes pairs (a, b), each the step h -> a h + b, and combines an earlier p with a later q to (q_a p_a, q_a p_b + q_b).
Whether a function does that is seen by calling it: on what it calls (sums and products alone make it a polynomial) and on random
numbers (two polynomials that agree there are one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from adjcomp import ops
from adjcomp.errors import CaptureError

Tensor = torch.Tensor
aten = torch.ops.aten
_POLYNOMIAL = {aten.mul.Tensor, aten.add.Tensor, aten.addcmul.default}
_HINT = (
    "supported is the linear recurrence (a, b) -> (q_a * p_a, q_a * p_b + q_b) of an earlier p and a later q; other recurrences "
    "are in adjcomp.ops"
)


class _Calls(TorchDispatchMode):
    """The operations that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def associative_scan(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """What `torch.associative_scan` returns, for linear recurrences along `dim`: the running products, and the states."""
    leaves, spec = pytree.tree_flatten(xs)
    if reverse:
        raise CaptureError("associative_scan with reverse=True runs against time: a later step would act on an earlier one")
    decay = _decay_of(combine_fn, spec) if len(leaves) == 2 else None
    if decay is None:
        raise CaptureError(f"associative_scan with a function of its own: {_HINT}")
    a, b = (leaf.movedim(dim, 1) for leaf in (leaves[decay], leaves[1 - decay]))
    h, _ = ops.linear_scan(a, b)
    start = torch.ones_like(a[:, 0])
    products, _ = ops.linear_scan(a, torch.zeros_like(a), start.to(torch.promote_types(a.dtype, torch.float32)))
    made = [h.movedim(1, dim)] * 2
    made[decay] = products.movedim(1, dim)
    return pytree.tree_unflatten(made, spec)


def _decay_of(combine_fn: Callable[[Any, Any], Any], spec: pytree.TreeSpec) -> int | None:
    """Which of two leaves is the decay a, where `combine_fn` combines steps h -> a h + b; None where it does anything else."""
    generator = torch.Generator().manual_seed(0)
    with _disable_current_modes(), torch.no_grad():
        p, q = ([torch.randn(64, dtype=torch.float64, generator=generator) for _ in range(2)] for _ in range(2))
        try:
            with _Calls() as calls:
                combined = pytree.tree_leaves(combine_fn(pytree.tree_unflatten(p, spec), pytree.tree_unflatten(q, spec)))
        except (RuntimeError, TypeError, ValueError, IndexError):  # it needs what isn't there: values of the trace, other shapes
            return None
        if not calls.seen <= _POLYNOMIAL or len(combined) != 2:
            return None
        for decay in (0, 1):
            wanted = [torch.empty(0)] * 2
            wanted[decay] = q[decay] * p[decay]
            wanted[1 - decay] = q[decay] * p[1 - decay] + q[1 - decay]
            if all(torch.allclose(made, want, rtol=1e-12, atol=1e-12) for made, want in zip(combined, wanted, strict=True)):
                return decay
    return None
