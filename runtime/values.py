"""What a step brings, leaves and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Held = list[Tensor | None]  # the tensors of one value of the plan; None where a carry takes no gradient


@dataclass(frozen=True)
class StepInputs:
    """What one call brings: parameters and buffers by name, sides and initial states from the prologue, the step's seed,
    whether norms of adjoint states are wanted, and whether kernels run in their fixed configurations.
    """

    state: dict[str, Tensor]
    sides: Sequence[Tensor]
    initial: Sequence[Tensor]
    seed: int
    adjoint_norms: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class StepOutputs:
    """What the forward leaves: totals of sums, per-token outputs, final states; in the stack's order."""

    sums: list[Tensor]
    outs: list[Tensor]
    finals: list[Tensor]


@dataclass(frozen=True)
class Cotangents:
    """What comes back from autograd, in the order of `StepOutputs`. None: no cotangent exists."""

    sums: Sequence[Tensor | None]
    outs: Sequence[Tensor | None]
    finals: Sequence[Tensor | None]


@dataclass(frozen=True)
class StepGradients:
    """Gradients in accumulation dtype: by parameter name, by side, by initial state. None: nothing flowed there."""

    parameters: dict[str, Tensor | None]
    sides: list[Tensor | None]
    initial: list[Tensor | None]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed over chunks in float32, float64 where the parameter is: bf16 sums over many chunks lose digits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def present(tensor: Tensor | None) -> Tensor:
    """The tensor of a value that the plan says is live."""
    if tensor is None:
        raise RuntimeError("a value of the plan is missing")
    return tensor


def mix_seed(seed: int, layer: int) -> int:
    """A layer's own seed from the step's (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed + (layer + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
