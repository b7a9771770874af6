"""What adjoint sharding costs by the paper's own accounting: its Table 1, and the storage of its §4.5.

The paper computes one vector-Jacobian product (VJP) for every pair of steps i ≤ t and layer. 𝒜, ℬ and 𝒞 are networks of one
layer from P inputs to the numbers of A, B and C; a linear map with bias from P to n numbers takes n(2P + 1) FLOPs, for every
sequence of a batch. Its sum of the truncated method is printed with a plus; the sum over t of min(t, T̄) has a minus.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

HALF = 2  # bytes of a half-precision number, in which the paper counts


class Structure(StrEnum):
    """What the transition A[t] is."""

    UNSTRUCTURED = "unstructured"  # a matrix of N × N numbers
    DIAGONAL = "diagonal"  # N numbers
    SCALAR = "scalar"  # one number times the identity


@dataclass(frozen=True)
class NetworkCost:
    """One VJP of one of the networks 𝒜, ℬ, 𝒞 at one pair of steps."""

    outputs: int  # numbers that the network makes for a step and a sequence
    parameters: int  # |θ|
    largest: int  # |θ|*, numbers of its largest parameter tensor
    numbers: int  # numbers of memory: batch · (outputs + |θ|*) + |θ|
    flops: int  # batch · outputs · (2P + 1)


@dataclass(frozen=True)
class VjpCosts:
    """Counts by the paper's formulas. VJPs are pairs of steps in one layer; FLOPs are those of the VJPs alone.

    `flops_full`, `flops_truncated`: 𝒜 and ℬ for every pair, 𝒞 for every step, in all layers. `flops_summed`: the same gradient
    with the sum over t taken first, one VJP a step and network, as adjcomp computes it.
    """

    structure: Structure
    vjps_full: int  # T (T + 1) / 2
    vjps_truncated: int  # T̄ T - T̄ (T̄ - 1) / 2
    a: NetworkCost
    b: NetworkCost
    c: NetworkCost
    bytes_per_vjp: int  # of the largest of the three, half precision
    flops_per_vjp: int  # 𝒜, ℬ and 𝒞 together
    flops_full: int
    flops_truncated: int
    flops_summed: int
    stored_bytes: int  # §4.5: batch · (T K (2N + P) + T P) + 3 N (P + 1) numbers
    listed_bytes: int  # what §4.5 lists: h, C, A and ŷ of every step and layer, dl/dy of every step, and all networks

    @property
    def saved(self) -> float:
        """Share of the VJPs that the window saves."""
        return 1 - self.vjps_truncated / self.vjps_full

    def __str__(self) -> str:
        rows = [f"{'':<4}{'numbers':>16}{'FLOPs':>16}"]
        for name, cost in (("𝒜", self.a), ("ℬ", self.b), ("𝒞", self.c)):
            rows.append(f"{name:<4}{cost.numbers:>16,}{cost.flops:>16,}")
        rows.append(f"VJPs {self.vjps_full:,} in full, {self.vjps_truncated:,} truncated ({100 * self.saved:.1f} % saved)")
        rows.append(
            f"FLOPs {self.flops_full:.3e} in full, {self.flops_truncated:.3e} truncated, {self.flops_summed:.3e} summed first"
        )
        return "\n".join(rows)


def vjp_costs(
    structure: str, *, N: int, P: int, batch: int = 1, T: int, K: int = 1, adjoint_window: int | None = None
) -> VjpCosts:
    """Costs of adjoint sharding as the paper counts them.

    Args:
        structure: "unstructured", "diagonal" or "scalar" transitions. N: state size. P: width. batch: sequences. T: steps.
        K: layers. adjoint_window: the truncation T̄; None, or one of at least T, for the full method.

    Raises:
        ValueError: an unknown structure, or a size below 1. TypeError: a size that is no integer.
    """
    if structure not in tuple(Structure):
        raise ValueError(f"structure must be one of {', '.join(map(repr, map(str, Structure)))}, not {structure!r}")
    for name, size in {"N": N, "P": P, "batch": batch, "T": T, "K": K, "adjoint_window": adjoint_window}.items():
        _check_size(name, size)
    kind = Structure(structure)
    transition = {Structure.UNSTRUCTURED: N * N, Structure.DIAGONAL: N, Structure.SCALAR: 1}[kind]
    # The paper counts N × P numbers for ℬ and 𝒞 of an unstructured system, and N for those of the others.
    reader = N * P if kind is Structure.UNSTRUCTURED else N
    a, b, c = (_network(outputs, P, batch) for outputs in (transition, reader, reader))
    window = T if adjoint_window is None else min(adjoint_window, T)
    full, truncated = T * (T + 1) // 2, window * T - window * (window - 1) // 2
    both = a.flops + b.flops
    tokens = batch * T
    return VjpCosts(
        structure=kind,
        vjps_full=full,
        vjps_truncated=truncated,
        a=a,
        b=b,
        c=c,
        bytes_per_vjp=HALF * max(a.numbers, b.numbers, c.numbers),
        flops_per_vjp=both + c.flops,
        flops_full=K * (full * both + T * c.flops),
        flops_truncated=K * (truncated * both + T * c.flops),
        flops_summed=K * T * (both + c.flops),
        stored_bytes=HALF * (tokens * (K * (2 * N + P) + P) + 3 * N * (P + 1)),
        listed_bytes=HALF * (tokens * (K * (transition + reader + N + P) + P) + K * (a.parameters + b.parameters + c.parameters)),
    )


def _check_size(name: str, size: object) -> None:
    if size is None and name == "adjoint_window":
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be a positive integer, not {size!r}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1, not {size}")


def _network(outputs: int, P: int, batch: int) -> NetworkCost:
    """A linear map with bias from P to `outputs` numbers."""
    weight, parameters = outputs * P, outputs * (P + 1)
    return NetworkCost(outputs, parameters, weight, batch * (outputs + weight) + parameters, batch * outputs * (2 * P + 1))
