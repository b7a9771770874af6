"""VJPs of recurrences whose adjoint reaches back a fixed number of steps (the paper's truncated adjoint sharding, Equation 7).

With h[t] = A[t] h[t-1] + b[t] and G[t] the cotangent that h[t] gets from what reads it, backpropagation's adjoint state is
μ[i] = Σ_{t≥i} (A[t] … A[i+1])ᴴ G[t]. Under a window of W steps it is λ[i] = Σ_{i≤t<i+W} (A[t] … A[i+1])ᴴ G[t]; then
db[i] = λ[i], dA[i] = λ[i] h[i-1]ᴴ, dh0 = A[0]ᴴ λ[0], and what reads h (C, D, z, q) gets its gradient as ever.

Between chunks travels one tensor `adjoint` of shape (B, state + (W - 1) · features): the cotangent of the incoming state, and
for each of the W - 1 steps after the chunk what its A and G are made of (zeros after the end: no cotangent). Each op takes that
of the steps after its chunk in the place of dh_last, and returns that of the steps from its first one on in the place of dh0.
Instead of states kept by the forward, whose layout is a kernel's own, the ops take the state before the chunk and rebuild the
others. There is no recurrent adjoint state: what is beyond the window must not be subtracted from a sum that may be far larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from adjcomp.ops.library import define, empty, masked_like

Sizes = Sequence[Any]


def _fake_scan(
    dh: Tensor | None, adjoint: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, mask: list[bool], window: int
) -> tuple[Tensor | None, ...]:
    return (*masked_like(mask[:2], a, h), _like(adjoint))


def _fake_selective(dy: Tensor | None, adjoint: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return (*masked_like(rest[-2][:8], *rest[:8]), _like(adjoint))


def _fake_delta(dy: Tensor | None, adjoint: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return (*masked_like(rest[-2][:5], *rest[:5]), _like(adjoint))


def _like(adjoint: Tensor) -> Tensor:
    return empty(adjoint, tuple(adjoint.shape))


_SCAN = "(Tensor? dh, Tensor adjoint, Tensor a, Tensor h, Tensor? h0, bool[3] mask, int window) -> (Tensor, Tensor, Tensor)"
_STEPPED = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor h0, bool dt_softplus"
_NINE = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_HEAD = "Tensor? dy, Tensor adjoint"
for _name in ("linear_scan", "dense_scan"):
    define(f"{_name}_window_vjp", _SCAN, _fake_scan)
define("selective_scan_window_vjp", f"({_HEAD}, {_STEPPED}, bool[9] mask, int window) -> {_NINE}", _fake_selective)
define("ssd_window_vjp", f"({_HEAD}, {_STEPPED}, float[]? dt_limit, bool[9] mask, int window) -> {_NINE}", _fake_selective)
define(
    "gated_delta_rule_window_vjp",
    f"({_HEAD}, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor h0, bool[6] mask, int window)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_delta,
)


def _linear_features(a: Sizes, *_: Sizes) -> int:
    return 2 * math.prod(a[2:])


def _dense_features(A: Sizes, *_: Sizes) -> int:
    return int(A[2] * A[2] + A[2])


def _selective_features(x: Sizes, dt: Sizes, A: Sizes, B: Sizes, C: Sizes, *_: Sizes) -> int:
    return math.prod(dt[2:]) + math.prod(x[2:]) + math.prod(C[2:])


def _delta_features(q: Sizes, k: Sizes, v: Sizes, g: Sizes, beta: Sizes, *_: Sizes) -> int:
    return sum(math.prod(sizes[2:]) for sizes in (q, k, v, g, beta))


# By op: numbers that a step after the chunk brings into its windows, from the shapes of the op's first arguments.
FEATURES: dict[str, Callable[..., int]] = {
    "linear_scan": _linear_features,
    "dense_scan": _dense_features,
    "selective_scan": _selective_features,
    "ssd": _selective_features,
    "gated_delta_rule": _delta_features,
}
