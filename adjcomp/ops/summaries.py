"""What a range of time does to any state that enters it, for placements that split time: an affine map, and its adjoint.

Forwards h_last = move(h0) + end; backwards, with cotangents of the outputs inside the range, dh0 = moveᴴ(dh_last) + end. Ranges
join by applying one map after the other. All results are float32 (float64 for float64 inputs, complex likewise); nothing here
is differentiable. `linear_scan`, `selective_scan` and `ssd` move a state elementwise (a decay), the others by a matrix from the
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adjcomp.ops.checks import ArgumentCheck, Kind
from adjcomp.ops.library import call, define, empty, state_dtype

Summary = tuple[Tensor, Tensor]


def linear_scan_summary(a: Tensor, b: Tensor) -> Summary:
    """Of `linear_scan`; a, b: (B, T, *S) -> decay, end: (B, *S)."""
    return _elementwise("linear_scan_summary", "b", a, b)


def linear_scan_adjoint_summary(dh: Tensor, a: Tensor) -> Summary:
    """Its adjoint; dh (the cotangent of h), a: (B, T, *S) -> decay, end: (B, *S)."""
    return _elementwise("linear_scan_adjoint_summary", "dh", a, dh, first=True)


def _elementwise(op: str, name: str, a: Tensor, other: Tensor, first: bool = False) -> Summary:
    check = ArgumentCheck(op)
    letters = " ".join(["B T", *(f"S{i}" for i in range(a.dim() - 2))])
    check.tensor("a", a, letters, Kind.REAL_OR_COMPLEX)
    check.tensor(name, other, letters, Kind.REAL_OR_COMPLEX)
    found: Summary = call(op, other, a) if first else call(op, a, other)
    return found


def dense_scan_summary(A: Tensor, b: Tensor) -> Summary:
    """Of `dense_scan`; A: (B, T, N, N), b: (B, T, N) -> move (B, N, N), end (B, N)."""
    return _dense("dense_scan_summary", "b", A, b)


def dense_scan_adjoint_summary(dh: Tensor, A: Tensor) -> Summary:
    """Its adjoint; dh: (B, T, N), A: (B, T, N, N) -> move (B, N, N), end (B, N)."""
    return _dense("dense_scan_adjoint_summary", "dh", A, dh, first=True)


def _dense(op: str, name: str, A: Tensor, other: Tensor, first: bool = False) -> Summary:
    check = ArgumentCheck(op)
    check.tensor("A", A, "B T N N", Kind.REAL_OR_COMPLEX)
    check.tensor(name, other, "B T N", Kind.REAL_OR_COMPLEX)
    found: Summary = call(op, other, A) if first else call(op, A, other)
    return found


def selective_scan_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *, dt_bias: Tensor | None = None, dt_softplus: bool = False
) -> Summary:
    """Of `selective_scan`, whose arguments these are -> decay, end: (batch, D, N)."""
    check = ArgumentCheck("selective_scan_summary")
    _check_selective(check, dt, A, dt_bias)
    check.tensor("x", x, "batch T D")
    check.tensor("B", B, "batch T N")
    found: Summary = call("selective_scan_summary", x, dt, A, B, dt_bias, dt_softplus)
    return found


def selective_scan_adjoint_summary(
    dy: Tensor,
    dt: Tensor,
    A: Tensor,
    C: Tensor,
    z: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Summary:
    """Its adjoint; dy is the cotangent of y -> decay, end: (batch, D, N)."""
    check = ArgumentCheck("selective_scan_adjoint_summary")
    _check_selective(check, dt, A, dt_bias)
    check.tensor("dy", dy, "batch T D")
    check.tensor("C", C, "batch T N")
    check.optional("z", z, "batch T D")
    found: Summary = call("selective_scan_adjoint_summary", dy, dt, A, C, z, dt_bias, dt_softplus)
    return found


def _check_selective(check: ArgumentCheck, dt: Tensor, A: Tensor, dt_bias: Tensor | None) -> None:
    check.tensor("dt", dt, "batch T D")
    check.tensor("A", A, "D N")
    check.optional("dt_bias", dt_bias, "D")


def ssd_summary(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = None,
) -> Summary:
    """Of `ssd`, whose arguments these are -> decay (batch, H, 1, 1), end (batch, H, P, N)."""
    check = ArgumentCheck("ssd_summary")
    _check_ssd(check, dt, A, dt_bias, B, "B")
    check.tensor("x", x, "batch T H P")
    found: Summary = call("ssd_summary", x, dt, A, B, dt_bias, dt_softplus, _limit(dt_limit))
    return found


def ssd_adjoint_summary(
    dy: Tensor,
    dt: Tensor,
    A: Tensor,
    C: Tensor,
    z: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = None,
) -> Summary:
    """Its adjoint; dy is the cotangent of y -> decay (batch, H, 1, 1), end (batch, H, P, N)."""
    check = ArgumentCheck("ssd_adjoint_summary")
    _check_ssd(check, dt, A, dt_bias, C, "C")
    check.tensor("dy", dy, "batch T H P")
    check.optional("z", z, "batch T H P")
    found: Summary = call("ssd_adjoint_summary", dy, dt, A, C, z, dt_bias, dt_softplus, _limit(dt_limit))
    return found


def _check_ssd(check: ArgumentCheck, dt: Tensor, A: Tensor, dt_bias: Tensor | None, shared: Tensor, name: str) -> None:
    check.tensor("dt", dt, "batch T H")
    check.tensor("A", A, "H")
    check.optional("dt_bias", dt_bias, "H")
    check.tensor(name, shared, "batch T G N")
    if shared.shape[2] == 0 or int(dt.shape[2]) % int(shared.shape[2]):
        raise check.error(
            name, f"of {shared.shape[2]} groups for {dt.shape[2]} heads", "a number of groups that divides the heads"
        )


def _limit(bounds: Sequence[float] | None) -> list[float] | None:
    return None if bounds is None else [float(bound) for bound in bounds]


def gated_delta_rule_summary(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
    """Of `gated_delta_rule`, whose arguments these are -> move (B, H, K, K), end (B, H, K, V)."""
    _check_delta(ArgumentCheck("gated_delta_rule_summary"), "v", v, (q, k, g, beta))
    found: Summary = call("gated_delta_rule_summary", q, k, v, g, beta)
    return found


def gated_delta_rule_adjoint_summary(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
    """Its adjoint; dy is the cotangent of y -> move (B, H, K, K), end (B, H, K, V)."""
    check = ArgumentCheck("gated_delta_rule_adjoint_summary")
    _check_delta(check, "v", v, (q, k, g, beta))
    check.tensor("dy", dy, "B T H V")
    found: Summary = call("gated_delta_rule_adjoint_summary", dy, q, k, v, g, beta)
    return found


def _check_delta(check: ArgumentCheck, name: str, v: Tensor, others: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, g, beta = others
    check.tensor("q", q, "B T H K")
    check.tensor("k", k, "B T H K")
    check.tensor(name, v, "B T H V")
    check.tensor("g", g, "B T H K" if g.dim() == 4 else "B T H")
    check.tensor("beta", beta, "B T H")


def _fake_linear(a: Tensor, b: Tensor) -> Summary:
    wide, shape = state_dtype(a, b), (a.shape[0], *a.shape[2:])
    return empty(a, shape, wide), empty(a, shape, wide)


def _fake_dense(A: Tensor, b: Tensor) -> Summary:
    wide, (batch, _, states) = state_dtype(A, b), b.shape
    return empty(b, (batch, states, states), wide), empty(b, (batch, states), wide)


def _fake_selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any) -> Summary:
    wide = state_dtype(x, dt, A, B, *(t for t in rest if isinstance(t, Tensor)))
    return empty(x, (x.shape[0], *A.shape), wide), empty(x, (x.shape[0], *A.shape), wide)


def _fake_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any) -> Summary:
    wide = state_dtype(x, dt, A, B, *(t for t in rest if isinstance(t, Tensor)))
    batch, _, heads, width = x.shape
    return empty(x, (batch, heads, 1, 1), wide), empty(x, (batch, heads, width, B.shape[3]), wide)


def _fake_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
    wide, (batch, _, heads, keys) = state_dtype(q, k, v, g, beta), k.shape
    return empty(v, (batch, heads, keys, keys), wide), empty(v, (batch, heads, keys, v.shape[3]), wide)


_RESULT = "-> (Tensor move, Tensor end)"
_GATES = "Tensor? dt_bias, bool dt_softplus"
define("linear_scan_summary", f"(Tensor a, Tensor b) {_RESULT}", _fake_linear)
define("linear_scan_adjoint_summary", f"(Tensor dh, Tensor a) {_RESULT}", lambda dh, a: _fake_linear(a, dh))
define("dense_scan_summary", f"(Tensor A, Tensor b) {_RESULT}", _fake_dense)
define("dense_scan_adjoint_summary", f"(Tensor dh, Tensor A) {_RESULT}", lambda dh, A: _fake_dense(A, dh))
define("selective_scan_summary", f"(Tensor x, Tensor dt, Tensor A, Tensor B, {_GATES}) {_RESULT}", _fake_selective)
define(
    "selective_scan_adjoint_summary",
    f"(Tensor dy, Tensor dt, Tensor A, Tensor C, Tensor? z, {_GATES}) {_RESULT}",
    _fake_selective,
)
define("ssd_summary", f"(Tensor x, Tensor dt, Tensor A, Tensor B, {_GATES}, float[]? dt_limit) {_RESULT}", _fake_ssd)
define(
    "ssd_adjoint_summary",
    f"(Tensor dy, Tensor dt, Tensor A, Tensor C, Tensor? z, {_GATES}, float[]? dt_limit) {_RESULT}",
    _fake_ssd,
)
define("gated_delta_rule_summary", f"(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) {_RESULT}", _fake_delta)
define(
    "gated_delta_rule_adjoint_summary",
    f"(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) {_RESULT}",
    lambda dy, q, k, v, g, beta: _fake_delta(q, k, v, g, beta),
)
