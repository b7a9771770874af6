"""Every windowed VJP is that of the recurrence whose states are rebuilt inside of the window, in whatever chunks it runs."""

from __future__ import annotations

from collections.abc import Callable

import op_cases
import paper_oracles
import pytest
import torch
from op_cases import Case
from torch import Tensor

from adjcomp.ops.windowed import FEATURES

CASES: dict[str, Callable[[int], Case]] = {
    "real": op_cases.linear_scan,
    "complex": lambda t: op_cases.linear_scan(t, complex_=True),
    "dense": op_cases.dense_scan,
    "selective": op_cases.selective_scan,
    "selective, bare": lambda t: op_cases.selective_scan(t, flags=(False,) * 5),
    "ssd": op_cases.ssd,
    "ssd, bare": lambda t: op_cases.ssd(t, flags=(False,) * 6),
    "delta": op_cases.gated_delta_rule,
    "delta, wide": lambda t: op_cases.gated_delta_rule(t, wide_decay=True),
    "delta, bare": lambda t: op_cases.gated_delta_rule(t, state=False),
}
STATE = {
    "selective_scan": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"),
    "ssd": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"),
}
SCANS = {"linear_scan": "a", "dense_scan": "A"}
LENGTH = 13


def oracle(case: Case, window: int, cotangent: Tensor) -> dict[str, Tensor]:
    """Gradients of every given argument by autograd through the rebuilt states."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.given().items()}
    options = {name: value for name, value in case.options.items() if value is not None}
    if "dt_bias" in leaves or case.name in STATE:
        options["dt_bias"] = leaves.get("dt_bias")
    arguments = {name: t for name, t in leaves.items() if name != "dt_bias"}
    y, _ = paper_oracles.OPS[case.name](window, **arguments, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), cotangent, allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), grads, strict=True)}


def cut(case: Case, start: int, end: int) -> dict[str, Tensor | None]:
    """The arguments of a chunk, without the state."""
    return {
        name: t[:, start:end] if t is not None and name in case.timed and (name != "A" or case.name == "dense_scan") else t
        for name, t in case.tensors.items()
        if name != "h0"
    }


def chunked(case: Case, window: int, cotangent: Tensor, chunk: int) -> dict[str, Tensor]:
    """The same by the windowed VJP, chunk by chunk from the end."""
    spans = [(s, min(s + chunk, LENGTH)) for s in range(0, LENGTH, chunk)]
    forward = getattr(torch.ops.adjcomp, case.name).default
    state, kept = case.tensors.get("h0"), []
    for start, end in spans:
        args = cut(case, start, end)
        results = forward(*ordered(case, args, state))
        kept.append((args, state, results))
        state = results[1]
    width = state[0].numel() + (window - 1) * FEATURES[case.name](*(t.shape for t in first_tensors(case, kept[0][0])))
    adjoint = state.new_zeros(state.shape[0], width)
    total: dict[str, Tensor] = {}
    pieces: dict[str, list[Tensor]] = {}
    for (start, end), (args, before, results) in zip(reversed(spans), reversed(kept), strict=True):
        names, grads, adjoint = vjp(case, args, before, results, cotangent[:, start:end].contiguous(), adjoint, window)
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                continue
            if name in case.timed and (name != "A" or case.name == "dense_scan"):
                pieces.setdefault(name, []).insert(0, grad)
            else:
                total[name] = total.get(name, 0) + grad
    total |= {name: torch.cat(parts, 1) for name, parts in pieces.items()}
    if case.tensors.get("h0") is not None:
        start_state = case.tensors["h0"]
        total["h0"] = adjoint[:, : start_state[0].numel()].view(start_state.shape)
    return total


def first_tensors(case: Case, args: dict[str, Tensor | None]) -> list[Tensor]:
    return [t for name, t in args.items() if name not in ("D", "z", "dt_bias")]


def ordered(case: Case, args: dict[str, Tensor | None], state: Tensor | None) -> list[object]:
    """Arguments of the raw forward op."""
    if case.name in STATE:
        options = [case.options["dt_softplus"]] + ([case.options["dt_limit"]] if case.name == "ssd" else [])
        return [*(args[name] for name in STATE[case.name]), state, *options]
    return [*args.values(), state]


def vjp(
    case: Case,
    args: dict[str, Tensor | None],
    before: Tensor | None,
    results: tuple[Tensor, ...],
    dy: Tensor,
    adjoint: Tensor,
    window: int,
) -> tuple[list[str], list[Tensor | None], Tensor]:
    """Names and cotangents of the arguments, and what the chunk before needs."""
    op = getattr(torch.ops.adjcomp, f"{case.name}_window_vjp").default
    start = torch.zeros_like(results[1]) if before is None else before
    if case.name in SCANS:
        transition = args[SCANS[case.name]]
        *grads, back = op(dy, adjoint, transition, results[0], before, [True] * 3, window)
        return [SCANS[case.name], "b"], grads, back
    if case.name in STATE:
        names = list(STATE[case.name])
        options = [case.options["dt_softplus"]] + ([case.options["dt_limit"]] if case.name == "ssd" else [])
        mask = [args[name] is not None for name in names] + [True]
        *grads, back = op(dy, adjoint, *(args[name] for name in names), start, *options, mask, window)
        return names, grads, back
    *grads, back = op(dy, adjoint, *args.values(), start, [True] * 6, window)
    return list(args), grads, back


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("window", "chunk"), [(1, 4), (2, 1), (3, 13), (5, 4), (7, 3), (4, 6), (13, 5), (30, 4)])
def test_a_windowed_vjp_is_that_of_the_rebuilt_states(name: str, window: int, chunk: int) -> None:
    """Given a recurrence, a window and chunks above and below it, then all gradients are the literal ones."""
    torch.manual_seed(0)
    case = CASES[name](LENGTH)
    y, *_ = case.op(**case.given(), **case.options)
    cotangent = torch.randn_like(y)
    want, got = oracle(case, window, cotangent), chunked(case, window, cotangent, chunk)
    assert got.keys() == want.keys()
    for key, expected in want.items():
        assert float((got[key] - expected).norm()) <= 1e-11 * (float(expected.norm()) + 1), key


@pytest.mark.parametrize("name", ["real", "dense"])
def test_transitions_of_zero_and_above_one_stay_exact(name: str) -> None:
    """Given transitions that are zero or larger than one, then the windowed gradient is still the literal one."""
    torch.manual_seed(1)
    case = CASES[name](LENGTH)
    transition = case.tensors[SCANS[case.name]]
    transition[:, ::3] = 0.0
    transition[:, 1::3] *= 40.0
    y, *_ = case.op(**case.given())
    cotangent = torch.randn_like(y)
    want, got = oracle(case, 4, cotangent), chunked(case, 4, cotangent, 5)
    for key, expected in want.items():
        assert float((got[key] - expected).norm()) <= 1e-11 * (float(expected.norm()) + 1), key
