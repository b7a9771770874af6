"""Parameters and buffers that other ranks have: stand-ins that know their shape, and refuse to be read.

Under a mesh of layers a model's parameters keep their identity, so optimizers and names go on working; but whoever computes with
one that isn't here, by the model's plain forward, a submodule's, a copy or a state_dict, gets an error that says where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# What a stand-in tells of itself. Other properties (`data`, `T`, …) are tensors with its values.
# fmt: off
_KNOWN = frozenset(
    (
        "_backward_hooks", "_base", "_grad", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad",
        "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized",
        "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim", "output_nr",
        "requires_grad", "retains_grad", "shape",
    )
)
_METHODS = frozenset(
    (
        "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_inference", "is_pinned", "is_shared", "is_signed", "nelement", "numel", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage",
    )
)
# fmt: on
_PROPERTY = frozenset(("__get__", "__set__", "__delete__"))


class _Elsewhere(torch.Tensor):
    """A buffer that is on another rank. `elsewhere`: the error for who reads it."""

    elsewhere: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _tells_of_itself(func):
            raise RuntimeError(_words(args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{tuple(self.shape)} {self.dtype}: {self.elsewhere.partition(':')[0]}>"


class _ElsewhereParameter(_Elsewhere, torch.nn.Parameter):
    """A parameter that is on another rank."""


def send_away(tensor: torch.Tensor, words: str) -> None:
    """Make a tensor refuse to be read from now on, with an error of these words. It stays the same object."""
    tensor.__class__ = _ElsewhereParameter if isinstance(tensor, torch.nn.Parameter) else _Elsewhere
    tensor.elsewhere = words  # type: ignore[attr-defined]


def _tells_of_itself(func: Callable[..., Any]) -> bool:
    """Whether a function reads or sets what a stand-in really has: everything but its values."""
    name = getattr(func, "__name__", "")
    if name in _PROPERTY:
        return getattr(getattr(func, "__self__", None), "__name__", "") in _KNOWN
    return name in _METHODS


def _words(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The error of the first stand-in among some arguments."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, _Elsewhere)]
    return tensors[0].elsewhere if tensors else "a parameter is on another rank"
