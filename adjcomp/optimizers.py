"""How many bytes an optimizer holds from its second step on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping

import torch

from adjcomp.runtime.memory import distinct_bytes
from adjcomp.runtime.mesh.sharded import local_part

_STATES = {"sgd": 0, "sgd-momentum": 1, "lion": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}
PROBE_ELEMENTS = 4096  # of the parameter on which an optimizer's state is measured; large enough for block-wise states


def optimizer_bytes(optimizer: torch.optim.Optimizer | str | None, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of optimizer state for the parameters that take a gradient.

    optimizer: an optimizer (what it will hold is measured by stepping a copy of it on a small parameter), one of the names
    "sgd", "sgd-momentum", "lion", "rmsprop", "adagrad", "adam", "adamw" (float32 states), or None for nothing.
    """
    trained = [p for p in parameters if p.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, str):
        if optimizer.lower() not in _STATES:
            raise ValueError(f"unknown optimizer {optimizer!r}; known names: {', '.join(_STATES)}; or pass the optimizer itself")
        return sum(4 * local_part(p).numel() for p in trained) * _STATES[optimizer.lower()]
    held = sum(
        _held_or_measured(optimizer, group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    )
    return int(held)


def optimizer_bytes_by_name(
    optimizer: torch.optim.Optimizer | str | None, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, int]:
    """The same by parameter."""
    if optimizer is None or isinstance(optimizer, str):
        return {name: optimizer_bytes(optimizer, [parameter]) for name, parameter in parameters.items()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) in names:
                found[names[id(parameter)]] = math.ceil(_held_or_measured(optimizer, group, parameter))
    return found


def live_bytes(optimizer: torch.optim.Optimizer | str | None) -> int:
    """Bytes of optimizer state that exist now."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    return distinct_bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))


def _held_or_measured(optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.nn.Parameter) -> float:
    state = optimizer.state.get(parameter)
    if state:
        return distinct_bytes(t for t in state.values() if isinstance(t, torch.Tensor))
    per_element, constant = _measured(optimizer, group, parameter.dtype)
    return per_element * local_part(parameter).numel() + constant


def _measured(optimizer: torch.optim.Optimizer, group: dict[str, object], dtype: torch.dtype) -> tuple[float, float]:
    """Bytes an element, and bytes a parameter, of the state after one step of the same class and settings."""
    probe = torch.nn.Parameter(torch.zeros(PROBE_ELEMENTS // 64, 64, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    settings = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = type(optimizer.state)(dict), [{**settings, "params": [probe]}]
    type(optimizer).step(trial)  # not trial.step: a scheduler has wrapped that for the optimizer itself
    sizes = [t.numel() * t.element_size() for t in trial.state[probe].values() if isinstance(t, torch.Tensor)]
    return sum(s for s in sizes if s >= PROBE_ELEMENTS) / PROBE_ELEMENTS, sum(s for s in sizes if s < PROBE_ELEMENTS)
