"""The arguments of a call, flattened: which tensors it brings, and where time is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adjcomp.errors import CaptureError
from adjcomp.passes.packing import jumps, restarts


@dataclass(frozen=True)
class InputTensor:
    """A tensor among the call's arguments: its path ("input_ids", "args[0]"), and where time is (None: it has no time axis).

    restarts: it lists positions that start anew inside a row. jumps: positions, and not each the next of the one before.
    """

    path: str
    time_dim: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    restarts: bool = False
    jumps: bool = False


@dataclass(frozen=True)
class CallTensors:
    """The arguments of one call, flattened."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    inputs: tuple[InputTensor, ...]  # of the tensor leaves, in order
    batch_size: int
    seq_len: int

    def doubtful(self) -> bool:
        """Whether a float input beside the first sequence is taken for one because its second size happens to be the length."""
        return self.without_doubtful_times() != self

    def without_doubtful_times(self) -> CallTensors:
        """The same call with such inputs taken for states or weights, which have no time."""
        first = next((i for i, entry in enumerate(self.inputs) if entry.time_dim is not None), -1)
        inputs = tuple(
            replace(entry, time_dim=None) if i != first and entry.dtype.is_floating_point and len(entry.shape) > 2 else entry
            for i, entry in enumerate(self.inputs)
        )
        return replace(self, inputs=inputs)


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallTensors:
    """Find the sequence length of a call: dimension 1 of the first tensor that has one.

    Another input has a time axis when it has the same batch size and length there; a 1-D integer input of that length is a list
    of
    positions. Raises ValueError for an empty sequence and for labels (or any integer input) whose length differs.
    """
    paths, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    leaves = tuple(leaf for _, leaf in paths)
    names = [_input_name(path) for path, _ in paths]
    sequences = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim >= 2]
    if not sequences:
        raise CaptureError(
            "the call has no tensor input with a batch and a time dimension: pass token ids (B, T) or a float "
            "sequence (B, T, D); "
            f"got {[f'{n}: {_describe(v)}' for n, v in zip(names, leaves, strict=True)] or 'no argument'}"
        )
    batch_size, seq_len = int(sequences[0].shape[0]), int(sequences[0].shape[1])
    if seq_len == 0 or batch_size == 0:
        raise ValueError(
            f"the input is empty: batch {batch_size}, sequence length T = {seq_len}; T and the batch must be at least 1"
        )
    inputs = []
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            time_dim = _time_dim(leaf, batch_size, seq_len)
            _check_length(name, leaf, time_dim, batch_size, seq_len)
            shape = tuple(map(int, leaf.shape))
            inputs.append(InputTensor(name, time_dim, shape, leaf.dtype, restarts(name, leaf), jumps(name, leaf)))
    return CallTensors(leaves, spec, tuple(inputs), batch_size, seq_len)


def _describe(value: object) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _input_name(path: tuple[Any, ...]) -> str:
    kind, rest = path[0].idx, path[1:]
    if kind == 0:
        return "args" + pytree.keystr(rest)
    head = getattr(rest[0], "key", rest[0])
    return f"{head}{pytree.keystr(rest[1:])}"


def _time_dim(tensor: torch.Tensor, batch_size: int, seq_len: int) -> int | None:
    if tensor.ndim >= 2 and tensor.shape[0] == batch_size and tensor.shape[1] == seq_len:
        return 1
    if tensor.ndim == 1 and tensor.shape[0] == seq_len and not tensor.is_floating_point() and seq_len > 1:
        return 0
    return None


def _check_length(name: str, tensor: torch.Tensor, time_dim: int | None, batch_size: int, seq_len: int) -> None:
    integer = not tensor.is_floating_point() and not tensor.is_complex()
    if time_dim is None and integer and tensor.ndim == 2:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} where the sequence is (B, T) = ({batch_size}, {seq_len}): "
            "every integer input of two dimensions must have the batch and length of the sequence"
        )
