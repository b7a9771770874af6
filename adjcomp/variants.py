"""The options that choose a gradient: their accepted values, and the warning that an approximation is in use."""

from __future__ import annotations

import warnings

import torch

from adjcomp.errors import CaptureError
from adjcomp.ir.narrow import ROUNDED
from adjcomp.ir.variant import Coupling, Variant
from adjcomp.options import Options

_WARNED: set[Variant | str] = set()


class ApproximationWarning(UserWarning):
    """Gradients are an approximation of backpropagation's, because an option asked for one."""


def make_variant(coupling: object, adjoint_window: object) -> Variant:
    """The variant of two options as a user gives them.

    Raises:
        ValueError: an unknown coupling, or a window below 1. TypeError: a window that is no integer.
    """
    accepted = tuple(c.value for c in Coupling)
    if coupling not in accepted:
        raise ValueError(f"coupling must be {' or '.join(map(repr, accepted))}, not {coupling!r}")
    if adjoint_window is None:
        return Variant(Coupling(str(coupling)))
    if isinstance(adjoint_window, bool) or not isinstance(adjoint_window, int):
        raise TypeError(f"adjoint_window must be a positive number of steps (an int) or None for all, not {adjoint_window!r}")
    if adjoint_window < 1:
        raise ValueError(f"adjoint_window must be at least 1 step, or None for all, not {adjoint_window}")
    return Variant(Coupling(str(coupling)), adjoint_window)


def check_streams(options: Options, variant: Variant) -> None:
    """ValueError where streams side by side are asked for and the gradient leaves nothing to run on them."""
    if options.streams > 1 and variant.coupling is Coupling.EXACT:
        raise ValueError(
            f"streams={options.streams} needs coupling='residual': exact, each layer's VJP waits for the one above it"
        )


def check_linear(model: torch.nn.Module, variant: Variant) -> None:
    """CaptureError where a window is asked for and a module's recurrence isn't linear in its state."""
    if variant.adjoint_window is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase):
            raise CaptureError(
                f"{name or 'the root module'}: adjoint_window={variant.adjoint_window} truncates linear recurrences, and that of "
                f"{type(module).__name__} isn't linear: accepted are models whose recurrences are those of adjcomp.ops"
            )


def warn_rounded() -> None:
    """Say that borders may be rounded; once a process."""
    if ROUNDED not in _WARNED:
        _WARNED.add(ROUNDED)
        warnings.warn(
            f"gradients may be an approximation of backpropagation ({ROUNDED}); the printed plan says whether they are",
            ApproximationWarning,
            stacklevel=3,
        )


def warn_once(variant: Variant) -> None:
    """Say that a variant is an approximation; once a process for each."""
    if variant.approximate and variant not in _WARNED:
        _WARNED.add(variant)
        warnings.warn(
            f"gradients are an approximation of backpropagation ({variant}); adjcomp.check_gradients measures how far off",
            ApproximationWarning,
            stacklevel=3,
        )
