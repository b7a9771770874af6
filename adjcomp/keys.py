"""When a captured graph may be used again: only under an equal key."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adjcomp.passes.calls import CallTensors

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Stream(enum.Enum):
    """How a call stands in a stream."""

    WHOLE = "whole"  # it is all of it
    FIRST = "first"  # it starts from the model's own initial states and hands its last ones on
    CONTINUED = "continued"  # it starts from given states


@dataclass(frozen=True)
class CallKind:
    """What is wanted of a call: gradients at all, gradients with respect to given states, and its place in a stream."""

    gradients: bool = True
    state_gradients: bool = False
    stream: Stream = Stream.WHOLE


TRAINING = CallKind()
EVALUATION = CallKind(gradients=False)


def capture_key(model: torch.nn.Module, call: CallTensors, kind: CallKind = TRAINING) -> tuple[Any, ...]:
    """All that a trace depends on but the sequence length: modules, parameters, autocast, the call's structure and constants."""
    wanted = (kind.gradients, kind.state_gradients)
    return (_call_key(call), _modules_key(model), _parameters_key(model), _mode_key(), wanted)


def _call_key(call: CallTensors) -> tuple[Any, ...]:
    inputs = iter(call.inputs)
    leaves: list[Any] = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            entry = next(inputs)
            fixed = tuple(None if dim == entry.time_dim else size for dim, size in enumerate(entry.shape))
            packed = (entry.restarts, entry.jumps)
            leaves.append((entry.path, entry.time_dim, fixed, leaf.dtype, str(leaf.device), leaf.requires_grad, packed))
        else:
            leaves.append((type(leaf).__name__, leaf))
    return (str(call.spec), tuple(leaves))


def _modules_key(model: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(module), _plain_attributes(vars(module))) for name, module in model.named_modules())


def _plain_attributes(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Attributes of plain Python type, one level into objects (a config); tensors by identity; hooks, in number and by name."""
    found: list[Any] = []
    for name, value in attributes.items():
        if isinstance(value, _PLAIN):
            found.append((name, value))
        elif isinstance(value, torch.Tensor):
            found.append((name, id(value), value.requires_grad))
        elif name.endswith("_hooks") and isinstance(value, Mapping):
            found.append((name, tuple(getattr(hook, "__name__", "") for hook in value.values())))
        elif name == "config":
            found.append((name, tuple((k, v) for k, v in sorted(vars(value).items()) if isinstance(v, _PLAIN))))
        elif isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value):
            found.append((name, value))
    return tuple(found)


def _parameters_key(model: torch.nn.Module) -> tuple[Any, ...]:
    entries = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return tuple((name, id(t), t.dtype, t.requires_grad, tuple(t.shape), str(t.device)) for name, t in entries)


def _mode_key() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    return (autocast, torch.is_grad_enabled(), torch.get_default_dtype())


def is_plain(value: object) -> bool:
    """Whether an argument is a value that can be compared with that of another call."""
    return isinstance(value, _PLAIN)


def check_leaves(call: CallTensors) -> None:
    """TypeError for arguments that are neither tensors nor plain values (a cache object, a callable)."""
    for path, leaf in zip(
        pytree.tree_flatten_with_path(pytree.tree_unflatten(list(call.leaves), call.spec))[0], call.leaves, strict=True
    ):
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            name = pytree.keystr(path[0])
            raise TypeError(
                f"argument {name} is a {type(leaf).__name__}; under gradients, arguments may be tensors and plain values"
            )
