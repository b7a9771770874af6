"""FSDP2 underneath a compiled model: `fully_shard` keeps parameters, gradients and optimizer state in parts on several ranks.

A step gathers the parameters once, uses them in both directions, and leaves every rank its part of the gradients. FSDP's own
hooks, which would gather around the forward of each module, don't run around a compiled call; they do around the plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from adjcomp.runtime.mesh.sharded import Sharding, is_sharded, shardings_of

Hooks = MutableMapping[int, Callable[..., Any]]


class _PlainOnly:
    """A hook of FSDP on a model that has a compiled view: it runs when the model itself is called, and not for the view."""

    def __init__(self, hook: Callable[..., Any], owner: torch.nn.Module) -> None:
        self.hook, self.owner = hook, owner
        self.__qualname__ = getattr(hook, "__qualname__", "")

    def __call__(self, module: torch.nn.Module, *rest: Any) -> Any:
        return self.hook(module, *rest) if module is self.owner else None


def take_over(model: torch.nn.Module, ranks: tuple[int, ...]) -> dict[str, Sharding]:
    """How the parameters of a model that is compiled for `ranks` are sharded; from now on FSDP leaves its compiled view alone.

    Raises:
        ValueError: parameters that aren't sharded by rows, over ranks outside of the mesh, or that FSDP casts to another type.
    """
    found = shardings_of(dict(model.named_parameters()))
    for name, sharding in found.items():
        if outside := set(sharding.ranks) - set(ranks):
            raise ValueError(f"{name} is sharded over rank {min(outside)}, which is no part of the mesh of the compiled model")
    if found:
        _refuse_casts(model)
        for hooks in _hooks_of(model):
            for key, hook in list(hooks.items()):
                if _is_of_fsdp(hook) and not isinstance(hook, _PlainOnly):
                    hooks[key] = _PlainOnly(hook, model)
    return found


def refuse_sharded(model: torch.nn.Module) -> None:
    """ValueError for sharded parameters of a model that is compiled for this process alone."""
    name = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if name is not None:
        raise ValueError(
            f"{name} is sharded (a DTensor): give compile() the mesh with mesh=…, whose dimensions say what its ranks share, "
            "'time' or 'data'; or compile the model before any fully_shard, for this process alone"
        )


def refuse_layers(shardings: Mapping[str, Sharding]) -> None:
    """ValueError for sharded parameters under a mesh of layers."""
    if shardings:
        raise ValueError(
            f"{min(shardings)} is sharded (a DTensor), and under a mesh of layers a rank has whole layers: leave fully_shard "
            "away, or name the mesh's dimension 'time'"
        )


def back_to_parts(model: torch.nn.Module) -> None:
    """Parameters that a plain forward has left gathered go back to their parts: they are what a step knows."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, the hooks of FSDP are off all modules: a trace gives parameters whole."""
    tables = [(hooks, dict(hooks)) for module in model.modules() for hooks in _hooks_of(module)]
    try:
        for hooks, known in tables:
            for key, hook in known.items():
                if _is_of_fsdp(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, known in tables:
            hooks.clear()
            hooks.update(known)


def _hooks_of(module: torch.nn.Module) -> tuple[Hooks, Hooks]:
    return module._forward_pre_hooks, module._forward_hooks


def _is_of_fsdp(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__qualname__", "").startswith("FSDPState.")


def _refuse_casts(model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._mp_policy
            if policy.param_dtype is not None or policy.reduce_dtype is not None:
                raise ValueError(
                    f"fully_shard was given a MixedPrecisionPolicy for {name or 'the model'}: a compiled model computes in its "
                    "parameters' own type, or under torch.autocast"
                )
