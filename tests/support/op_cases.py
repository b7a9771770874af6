"""Arguments for every op, and the comparison with its float64 reference."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from adjcomp import ops
from adjcomp.ops import reference

Args = dict[str, Tensor | None]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 0.5 + 0.01


@dataclass(frozen=True)
class Case:
    """One call: tensors by argument name (None for those left out) and options."""

    name: str
    tensors: Args
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return getattr(ops, self.name)

    @property
    def reference(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return getattr(reference, self.name)

    @property
    def timed(self) -> set[str]:
        """The arguments whose dimension 1 is time."""
        return {"a", "b", "x", "dt", "B", "C", "z", "q", "k", "v", "g", "beta"} | ({"A"} if self.name == "dense_scan" else set())

    def given(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t is not None}


def _keep(flags: list[bool], args: Args, names: list[str]) -> Args:
    return {**args, **{name: args[name] if flag else None for name, flag in zip(names, flags, strict=True)}}


def linear_scan(t: int, b: int = 2, d: int = 5, state: bool = True, complex_: bool = False) -> Case:
    if complex_:
        a = torch.rand(b, t, d, dtype=torch.float64) * torch.exp(1j * normal(b, t, d))
        return Case(
            "linear_scan",
            {
                "a": a,
                "b": torch.complex(normal(b, t, d), normal(b, t, d)),
                "h0": torch.complex(normal(b, d), normal(b, d)) if state else None,
            },
        )
    return Case(
        "linear_scan",
        {"a": torch.rand(b, t, d, dtype=torch.float64), "b": normal(b, t, d), "h0": normal(b, d) if state else None},
    )


def dense_scan(t: int, b: int = 2, n: int = 4, state: bool = True, complex_: bool = False) -> Case:
    draw = (lambda *shape: torch.complex(normal(*shape), normal(*shape))) if complex_ else normal
    scale = (0.35 if complex_ else 0.5) / n**0.5
    return Case("dense_scan", {"A": draw(b, t, n, n) * scale, "b": draw(b, t, n), "h0": draw(b, n) if state else None})


def selective_scan(t: int, b: int = 2, d: int = 7, n: int = 5, flags: tuple[bool, ...] = (True,) * 5) -> Case:
    D, z, h0, bias, softplus = flags
    tensors = {
        "x": normal(b, t, d),
        "dt": positive(b, t, d),
        "A": -positive(d, n) * 8,
        "B": normal(b, t, n),
        "C": normal(b, t, n),
        "D": normal(d),
        "z": normal(b, t, d),
        "h0": normal(b, d, n),
        "dt_bias": normal(d) * 0.1,
    }
    bias = bias and softplus  # a bias without softplus may make a step negative, and the recurrence explode
    return Case("selective_scan", _keep([D, z, h0, bias], tensors, ["D", "z", "h0", "dt_bias"]), {"dt_softplus": softplus})


def ssd(t: int, b: int = 2, g: int = 2, r: int = 2, p: int = 6, n: int = 5, flags: tuple[bool, ...] = (True,) * 6) -> Case:
    D, z, h0, bias, softplus, limit = flags
    h = g * r
    tensors = {
        "x": normal(b, t, h, p),
        "dt": positive(b, t, h),
        "A": -positive(h) * 8,
        "B": normal(b, t, g, n),
        "C": normal(b, t, g, n),
        "D": normal(h),
        "z": normal(b, t, h, p),
        "h0": normal(b, h, p, n),
        "dt_bias": normal(h) * 0.1,
    }
    bias = bias and softplus
    options = {"dt_softplus": softplus, "dt_limit": (0.1, 0.9) if limit else None}
    return Case("ssd", _keep([D, z, h0, bias], tensors, ["D", "z", "h0", "dt_bias"]), options)


def gated_delta_rule(
    t: int, b: int = 2, h: int = 2, k: int = 5, v: int = 3, state: bool = True, wide_decay: bool = False
) -> Case:
    unit = torch.nn.functional.normalize
    g = -positive(b, t, h, k) if wide_decay else -positive(b, t, h)
    return Case(
        "gated_delta_rule",
        {
            "q": unit(normal(b, t, h, k), dim=-1),
            "k": unit(normal(b, t, h, k), dim=-1),
            "v": normal(b, t, h, v),
            "g": g,
            "beta": positive(b, t, h),
            "h0": normal(b, h, k, v) if state else None,
        },
    )


def linear_attention(t: int, b: int = 2, h: int = 2, k: int = 5, v: int = 3, state: bool = True) -> Case:
    tensors = {"q": normal(b, t, h, k), "k": normal(b, t, h, k), "v": normal(b, t, h, v), "g": -positive(b, t, h)}
    return Case("linear_attention", {**tensors, "h0": normal(b, h, k, v) if state else None})


def max_plus_scan(t: int, b: int = 2, d: int = 5, state: bool = True) -> Case:
    tensors = {"a": -positive(b, t, d), "b": normal(b, t, d) - 1, "h0": normal(b, d) if state else None}
    return Case("max_plus_scan", tensors)


def causal_conv1d(t: int, b: int = 2, d: int = 6, w: int = 4, flags: tuple[bool, ...] = (True,) * 3) -> Case:
    bias, tail, silu = flags
    tensors = {"x": normal(b, t, d), "weight": normal(d, w), "bias": normal(d), "tail": normal(b, w - 1, d)}
    return Case("causal_conv1d", _keep([bias, tail], tensors, ["bias", "tail"]), {"activation": "silu" if silu else None})


def booleans(count: int) -> st.SearchStrategy[tuple[bool, ...]]:
    return st.tuples(*[st.booleans()] * count)


STEPS, FEW = st.integers(1, 100), st.integers(1, 3)


def lazily(make: Callable[..., Case], *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Callable[[], Case]]:
    """A case by its shape arguments; the tensors are drawn when it is called, so that a test can seed them."""
    return st.builds(partial, st.just(make), *arguments)


STRATEGIES: dict[str, st.SearchStrategy[Callable[[], Case]]] = {
    "linear_scan": lazily(linear_scan, STEPS, FEW, st.integers(1, 40), st.booleans()),
    "complex": lazily(linear_scan, STEPS, FEW, st.integers(1, 20), st.booleans(), st.just(True)),
    "dense_scan": lazily(dense_scan, STEPS, FEW, st.integers(1, 9), st.booleans()),
    "selective_scan": lazily(selective_scan, STEPS, FEW, st.integers(1, 40), st.integers(1, 20), booleans(5)),
    "ssd": lazily(ssd, STEPS, FEW, FEW, FEW, st.integers(1, 9), st.integers(1, 20), booleans(6)),
    "gated_delta_rule": lazily(
        gated_delta_rule, STEPS, FEW, FEW, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans()
    ),
    "linear_attention": lazily(linear_attention, STEPS, FEW, FEW, st.integers(1, 9), st.integers(1, 9), st.booleans()),
    "max_plus_scan": lazily(max_plus_scan, STEPS, FEW, st.integers(1, 40), st.booleans()),
    "causal_conv1d": lazily(causal_conv1d, STEPS, FEW, st.integers(1, 40), st.integers(1, 6), booleans(3)),
}
SMALL: dict[str, Callable[[int], Case]] = {
    "linear_scan": linear_scan,
    "complex": lambda t: linear_scan(t, complex_=True),
    "dense_scan": dense_scan,
    "selective_scan": selective_scan,
    "ssd": ssd,
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule_wide": lambda t: gated_delta_rule(t, wide_decay=True),
    "linear_attention": linear_attention,
    "max_plus_scan": max_plus_scan,
    "causal_conv1d": causal_conv1d,
}


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in a real dtype, or in the complex one of the same width."""
    return t.to(torch.complex64 if t.is_complex() and dtype == torch.float32 else t.dtype if t.is_complex() else dtype)


def relative_errors(
    case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor] = lambda t: t, floor: float = 0.0
) -> dict[str, float]:
    """Relative L2 error of every output and gradient of the op in `dtype` against the reference in float64.

    A gradient much smaller than all gradients together (sums that cancel) is measured against `floor` times those.
    """
    low = {name: layout(cast(t, dtype)).detach().requires_grad_() for name, t in case.given().items()}
    high = {
        name: t.detach().to(torch.complex128 if t.is_complex() else torch.float64).requires_grad_() for name, t in low.items()
    }
    got, want = case.op(**low, **case.options), case.reference(**high, **case.options)
    seeds = [torch.randn_like(w) for w in want]
    grads = torch.autograd.grad([*got], [*low.values()], [s.to(g.dtype) for s, g in zip(seeds, got, strict=True)])
    expected = torch.autograd.grad(
        [*want], [*high.values()], [s.to(g.dtype).to(s.dtype) for s, g in zip(seeds, got, strict=True)]
    )
    names = ["out", "last", *(f"d{name}" for name in low)]
    pairs = zip([*got, *grads], [*want, *expected], strict=True)
    least = max(1e-12, floor * sum(g.norm().item() for g in expected))
    return {name: ((p - q).norm() / q.norm().clamp_min(least)).item() for name, (p, q) in zip(names, pairs, strict=True)}


class Careful(enum.Enum):
    """How eager torch may compute in a 16-bit dtype."""

    THROUGHOUT = "throughout"  # every operation in the dtype: states and sums lose digits at every step
    AT_THE_EDGES = "at the edges"  # inputs, outputs and gradients in the dtype, everything between in float32


def errors_beside_eager(case: Case, dtype: torch.dtype, eager: Careful) -> dict[str, tuple[float, float]]:
    """For every output and gradient in a 16-bit dtype: relative L2 errors of the op, and of torch's own operations.

    Both are measured against float64 on the same inputs.
    """
    low = {name: t.to(dtype).detach().requires_grad_() for name, t in case.given().items()}
    high = {name: t.detach().double().requires_grad_() for name, t in low.items()}
    got, want = case.op(**low, **case.options), case.reference(**high, **case.options)
    wide = {name: t.float() if eager is Careful.AT_THE_EDGES else t for name, t in low.items()}
    theirs = [t.to(g.dtype) for t, g in zip(case.reference(**wide, **case.options), got, strict=True)]
    seeds = [torch.randn_like(w).to(g.dtype) for w, g in zip(want, got, strict=True)]
    found = [[*made, *torch.autograd.grad([*made], [*low.values()], seeds)] for made in (got, theirs)]
    exact = [*want, *torch.autograd.grad([*want], [*high.values()], [s.double() for s in seeds])]
    names = ["out", "last", *(f"d{name}" for name in low)]
    return beside(names, *found, exact)


def beside(names: list[str], ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Relative L2 errors of two computations, by name."""
    return {name: (relative(p, w), relative(q, w)) for name, p, q, w in zip(names, ours, theirs, exact, strict=True)}


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 error."""
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-12)).item()


def worse_than_eager(errors: dict[str, tuple[float, float]], factor: float = 1.5) -> dict[str, tuple[float, float]]:
    """The errors above `factor` times eager's; up to 2e-6, what float32 may have, all are right."""
    return {name: (ours, theirs) for name, (ours, theirs) in errors.items() if ours > max(factor * theirs, 2e-6)}


def loss_beside_eager(dtype: torch.dtype, rows: int, width: int, vocab: int) -> dict[str, tuple[float, float]]:
    """The same of the head with its loss; eager torch rounds its logits to the dtype."""
    leaves = [t.to(dtype).requires_grad_() for t in (normal(1, rows, width), normal(vocab, width) / width**0.5)]
    labels = torch.randint(0, vocab, (1, rows))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    losses = [
        (ops.linear_cross_entropy(leaves[0], leaves[1], labels)[0], leaves),
        (functional.cross_entropy((leaves[0] @ leaves[1].T).float()[0], labels[0], reduction="sum"), leaves),
        (functional.cross_entropy((exact[0] @ exact[1].T)[0], labels[0], reduction="sum"), exact),
    ]
    return beside(["loss", "dx", "dweight"], *([loss, *torch.autograd.grad(loss, of)] for loss, of in losses))


def norm_beside_eager(dtype: torch.dtype, rows: int, width: int) -> dict[str, tuple[float, float]]:
    """The same of the norm, beside torch's own."""
    leaves = [t.to(dtype).requires_grad_() for t in (normal(1, rows, width), normal(width))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    seed = normal(1, rows, width).to(dtype)
    made = [
        (ops.rms_norm(*leaves, 1e-5), leaves),
        (functional.rms_norm(leaves[0], (width,), leaves[1], 1e-5), leaves),
        (functional.rms_norm(exact[0], (width,), exact[1], 1e-5), exact),
    ]
    return beside(["y", "dx", "dweight"], *([y, *torch.autograd.grad(y, of, seed.to(y.dtype))] for y, of in made))
