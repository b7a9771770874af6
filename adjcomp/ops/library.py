"""The operator library `adjcomp`: how an op, its fake kernel and its VJP are declared.

Every op is declared twice, as `adjcomp::<op>` and `adjcomp::<op>_vjp`, so that a trace of `torch.autograd.grad` shows the VJP as
one explicit node. The forward returns what its VJP wants (a checkpoint of states, a normaliser) as a last output, which the
public functions of `adjcomp.ops` hide. A VJP takes the cotangents of the outputs (None stands for zeros) and a mask over the
differentiable inputs in the op's argument order; it returns None wherever the mask is False.

Implementations are registered per device by `adjcomp.runtime.kernels.registry`; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "adjcomp"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OP_NAMES: list[str] = []

Fake = Callable[..., Any]
Setup = Callable[[Any, tuple[Any, ...], Any], None]
Backward = Callable[..., Any]


def define(name: str, signature: str, fake: Fake) -> None:
    """Declare `adjcomp::<name>` with its schema and its shape-only kernel (fake and meta tensors).

    `signature` is the schema without the name, e.g. "(Tensor a, Tensor? b) -> Tensor".
    """
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    OP_NAMES.append(name)


def differentiate(name: str, setup: Setup, backward: Backward) -> None:
    """Give `adjcomp::<name>` its first derivative, and `adjcomp::<name>_vjp` a clear refusal of a second one."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=LIBRARY)

    def refuse(ctx: Any, *cotangents: Tensor | None) -> Any:
        raise RuntimeError(
            f"adjcomp.ops.{name} has no second derivative: its VJP cannot be differentiated again (double backward)"
        )

    torch.library.register_autograd(f"{NAMESPACE}::{name}_vjp", refuse, lib=LIBRARY)


def call(name: str, *args: Any) -> Any:
    """Call `adjcomp::<name>` through the dispatcher."""
    return getattr(torch.ops.adjcomp, name).default(*args)


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of states and of arithmetic: float32, or float64 where any input is float64; complex64/128 for complex inputs."""
    given = [t.dtype for t in tensors if t is not None]
    double = any(d in (torch.float64, torch.complex128) for d in given)
    if any(d.is_complex for d in given):
        return torch.complex128 if double else torch.complex64
    return torch.float64 if double else torch.float32


def empty(like: Tensor, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous uninitialised tensor on `like`'s device; `dtype` is `like`'s unless given."""
    return like.new_empty(shape, dtype=like.dtype if dtype is None else dtype)


def masked_like(mask: list[bool], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Fake cotangents: a contiguous tensor like each input where the mask is True, else None."""
    return tuple(empty(t, tuple(t.shape)) if keep and t is not None else None for keep, t in zip(mask, inputs, strict=True))


def checkpoint_count(steps: int | torch.SymInt, interval: int) -> int | torch.SymInt:
    """How many states a forward keeps for its VJP: one before every `interval` steps, and the final one.

    Never below 2, so a symbolic number of steps is never compared with 1 (which would specialise a trace).
    """
    return (steps + (interval - 1)) // interval + 1
