"""Summaries of ranges, joined, against the op on the whole: for any implementation of the ops."""

from __future__ import annotations

import torch
from op_cases import Case, cast
from torch import Tensor

from adjcomp import ops

FORWARD = {
    "linear_scan": ("a", "b"),
    "dense_scan": ("A", "b"),
    "selective_scan": ("x", "dt", "A", "B"),
    "ssd": ("x", "dt", "A", "B"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
}
ADJOINT = {
    "linear_scan": ("a",),
    "dense_scan": ("A",),
    "selective_scan": ("dt", "A", "C", "z"),
    "ssd": ("dt", "A", "C", "z"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
}
BY_MATRIX = {"dense_scan", "gated_delta_rule"}


def moved(name: str, move: Tensor, state: Tensor) -> Tensor:
    """A state, or adjoint state, carried over a range."""
    if name not in BY_MATRIX:
        return move * state
    return (move @ state[..., None])[..., 0] if name == "dense_scan" else move @ state


def summary_errors(case: Case, cuts: list[int], dtype: torch.dtype) -> tuple[float, float]:
    """Relative errors of the last state and of the initial state's cotangent, from summaries of ranges cut at `cuts`."""
    name, args = case.name, {key: cast(t, dtype) for key, t in case.given().items()}
    wide = {key: t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for key, t in args.items()}
    wide["h0"].requires_grad_()
    out, last = case.reference(**wide, **case.options)
    dy, dlast = torch.randn_like(out), torch.randn_like(last)
    (dh0,) = torch.autograd.grad([out, last], wide["h0"], [dy, dlast])
    shared = {"dt_bias": args["dt_bias"]} if "dt_bias" in args else {}
    spans = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, out.shape[1]], strict=True)]

    def part(key: str, span: slice) -> Tensor:
        return args[key][:, span] if key in case.timed else args[key]

    state, adjoint = args["h0"], cast(dlast, dtype)
    for span in spans:
        given = [part(key, span) for key in FORWARD[name]]
        move, end = getattr(ops, f"{name}_summary")(*given, **shared, **case.options)
        state = moved(name, move, state) + end
    for span in reversed(spans):
        given = [cast(dy, dtype)[:, span], *(part(key, span) for key in ADJOINT[name])]
        move, end = getattr(ops, f"{name}_adjoint_summary")(*given, **shared, **case.options)
        adjoint = moved(name, move, adjoint) + end
    return tuple(((got - want).norm() / want.norm()).item() for got, want in ((state, last), (adjoint, dh0)))
