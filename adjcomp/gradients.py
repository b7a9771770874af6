"""Compare a compiled model's gradients with plain autograd's, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GradientError:
    """One parameter: norms of plain's gradient and of the difference; None where plain leaves it None, as ours must."""

    name: str
    plain_norm: float | None
    difference_norm: float | None
    relative_error: float


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a compiled model against plain autograd.

    max_relative_error: the largest over parameters of |g - g_plain| / (|g_plain| + 1e-3 |all g_plain|); infinite where one of the
    two is None and the other is not, or anything is not finite. 1e-5 is the bound that float32 models must meet.
    """

    loss: float
    plain_loss: float
    per_parameter: tuple[GradientError, ...]

    @property
    def max_relative_error(self) -> float:
        """The largest relative error over all parameters."""
        return max((entry.relative_error for entry in self.per_parameter), default=0.0)

    def __str__(self) -> str:
        width = max((len(entry.name) for entry in self.per_parameter), default=9)
        lines = [f"{'parameter':<{width}}  {'|g| plain':>10}  {'|difference|':>12}  {'error':>8}"]
        for entry in sorted(self.per_parameter, key=lambda e: -e.relative_error):
            norms = [("none" if n is None else f"{n:.3e}") for n in (entry.plain_norm, entry.difference_norm)]
            lines.append(f"{entry.name:<{width}}  {norms[0]:>10}  {norms[1]:>12}  {entry.relative_error:8.1e}")
        lines.append(f"loss {self.loss:.7g}, plain {self.plain_loss:.7g}; largest error {self.max_relative_error:.1e}")
        return "\n".join(lines)


Gradients = dict[str, torch.Tensor | None]


def measure(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients of `run()`; the gradients that the model held before are put back."""
    held = {name: p.grad for name, p in model.named_parameters()}
    try:
        model.zero_grad(set_to_none=True)
        loss = run()
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = held[name]


def compare(plain: tuple[float, Gradients], ours: tuple[float, Gradients]) -> GradientReport:
    """The report on two measurements."""
    known = [g for g in plain[1].values() if g is not None]
    scale = 1e-3 * sum(g.abs().double().pow(2).sum().item() for g in known) ** 0.5
    entries = tuple(_entry(name, expected, ours[1].get(name), scale) for name, expected in plain[1].items())
    return GradientReport(ours[0], plain[0], entries)


def _entry(name: str, expected: torch.Tensor | None, got: torch.Tensor | None, scale: float) -> GradientError:
    if expected is None or got is None:
        agree = expected is None and got is None
        norm = None if expected is None else float(expected.norm())
        return GradientError(name, norm, None, 0.0 if agree else float("inf"))
    difference, norm = float((got - expected).norm()), float(expected.norm())
    finite = bool(got.isfinite().all())
    return GradientError(name, norm, difference, difference / ((norm + scale) or 1.0) if finite else float("inf"))


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: its `loss` entry, the output itself, or the first tensor, whichever is a scalar; else a mean
    of squares.
    """
    if isinstance(output, Mapping) and output.get("loss") is not None:
        loss: torch.Tensor = output["loss"]
        return loss
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not tensors:
        raise ValueError("the model's output holds no float tensor to differentiate")
    scalars = [t for t in tensors if t.ndim == 0]
    return scalars[0] if scalars else tensors[0].square().mean()
