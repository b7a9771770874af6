"""What all C++ kernels share on the Python side: loading with a fallback, tensor views for ctypes, and the thread count."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from adjcomp.runtime.kernels.cpu.build import BuildError, library
from adjcomp.runtime.resident import ask_for_large_pages, keep_freed_memory

SHARED_WORK = 1 << 14  # numbers below which waking other threads costs more than it gains


class Matrix(ctypes.Structure):
    """A (batch, time, inner) tensor whose inner dimension is contiguous; strides in elements. A null pointer stands for None."""

    _fields_ = (("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64), ("time_stride", ctypes.c_int64))


class Heads(ctypes.Structure):
    """A (batch, time, head, inner) tensor whose inner dimension is contiguous; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("time_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


@cache
def _failure() -> list[str]:
    return []


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The compiled library of an op, or None (with one warning per process) where it can't be compiled."""
    try:
        found = library(name)
        keep_freed_memory()  # what an op returns is fresh memory in every call
        return found
    except (BuildError, OSError) as error:
        if not _failure():
            _failure().append(str(error))
            warnings.warn(
                f"adjcomp runs its recurrences in torch, several times slower than its C++ kernels: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None


def required(name: str) -> ctypes.CDLL:
    """The library of an op that `load` has already found."""
    found = load(name)
    if found is None:
        raise BuildError(f"the C++ kernel {name} is not available")
    return found


def suffix(dtype: torch.dtype) -> str:
    """How the entry points for a dtype end: "float32", "float64", "complex64", "complex128"."""
    return str(dtype).removeprefix("torch.")


def rows(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype` with its last dimension contiguous; the other strides (also 0) are kept where no cast is needed."""
    if t.dtype is dtype and t.stride(-1) == 1:
        return t
    t = t.detach().to(dtype)
    if t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    if t.stride(-1) == 0:
        return t.contiguous()
    outer = [1 if t.stride(i) == 0 else t.shape[i] for i in range(t.dim() - 1)]
    return t[tuple(slice(size) for size in outer)].contiguous().expand(t.shape)


def matrix(t: Tensor) -> Matrix:
    """The view of a tensor that went through `rows`."""
    return Matrix(t.data_ptr(), t.stride(0), t.stride(1))


Argument = int | float | Matrix | Tensor | None
# How a field is packed: the letter of `struct`, and how many numbers: one, or an address and its strides.
_PACKED: dict[type, tuple[str, int]] = {
    ctypes.c_int64: ("q", 1),
    ctypes.c_void_p: ("q", 1),
    ctypes.c_double: ("d", 1),
    Matrix: ("qqq", 3),
    Heads: ("qqqq", 4),
}
_ABSENT = [(0,) * width for width in range(5)]


@cache
def _layout(structure: type[ctypes.Structure]) -> tuple[Struct, tuple[tuple[str, int], ...]]:
    """How a structure is packed, and the name and width of each field. Fields are words of eight bytes: nothing is padded."""
    fields = [(name, *_PACKED[kind]) for name, kind in structure._fields_]  # type: ignore[misc]
    return Struct("=" + "".join(letters for _, letters, _ in fields)), tuple((name, width) for name, _, width in fields)


@cache
def _entry(name: str, entry: str) -> Callable[[bytes], None]:
    found: Any = getattr(required(name), entry)
    found.argtypes, found.restype = (ctypes.c_char_p,), None
    return found  # type: ignore[no-any-return]


def threads_for(work: int) -> int:
    """torch's thread count, or 1 where the work (in numbers) is too small to share."""
    return torch.get_num_threads() if work >= SHARED_WORK else 1


def groups(batch: int, vectors: int, threads: int) -> int:
    """Into how many parts to split the channels so that batch x parts keeps every thread equally busy."""
    return max(1, min(vectors, threads // math.gcd(batch, threads)))


def run(name: str, entry: str, structure: type[ctypes.Structure], values: Mapping[str, Argument]) -> None:
    """Call `<entry>` of the library `name` with one structure, whose fields are filled by name; absent ones are null.

    Tensors must have the entry's dtype and have gone through `rows` (matrices) or be contiguous (pointers).
    """
    packer, fields = _layout(structure)
    words: list[int | float] = []
    for field, width in fields:
        value = values.get(field)
        if value is None:
            words += _ABSENT[width]
        elif isinstance(value, Tensor):
            words.append(value.data_ptr())
            if width > 1:
                words += value.stride()[: width - 1]
        elif isinstance(value, Matrix):
            words += (value.data or 0, value.batch_stride, value.time_stride)
        else:
            words.append(value)
    ask_for_large_pages()
    _entry(name, entry)(packer.pack(*words))


def dense(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`t` contiguous in `dtype`."""
    if t is None or (t.dtype is dtype and t.is_contiguous()):
        return t
    return t.detach().to(dtype).contiguous()


def rows_of(dtype: torch.dtype, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """`rows` of each tensor that is there."""
    return {name: None if t is None else rows(t, dtype) for name, t in tensors.items()}


def dense_of(dtype: torch.dtype, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """`dense` of each tensor."""
    return {name: dense(t, dtype) for name, t in tensors.items()}
