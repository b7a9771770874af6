"""Validation of op arguments: names the op, the argument, its value and what is supported.

Only shapes, dtypes and devices are read, so the checks are safe on fake tensors; a symbolic size is never compared in a way that
would specialise a trace (it is refused only where it is known to differ).
"""

from __future__ import annotations

from enum import Enum
from typing import final

import torch
from torch import Tensor

Size = int | torch.SymInt


class Kind(Enum):
    """Which dtypes an argument takes."""

    REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    REAL_OR_COMPLEX = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
    INTEGER = (torch.int64, torch.int32)
    INDEX = (torch.int64,)

    @property
    def text(self) -> str:
        """The dtypes as a reader would write them."""
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in self.value)


def known_different(a: Size, b: Size) -> bool:
    """Whether two sizes differ for sure, without adding a guard on a symbolic one."""
    if isinstance(a, int) and isinstance(b, int):
        return a != b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a != b))


@final
class ArgumentCheck:
    """Checks the tensors of one call against dimension letters; the first use of a letter binds its size.

    >>> check = ArgumentCheck("dense_scan"); check.tensor("A", A, "B T N N"); check.tensor("b", b, "B T N")
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, Size] = {}
        self.device: torch.device | None = None
        self.device_owner = ""

    def error(self, argument: str, found: object, supported: str) -> ValueError:
        """A ValueError that names op, argument, what was found and what is supported."""
        return ValueError(f"adjcomp.ops.{self.op}: argument `{argument}` is {found}; supported: {supported}")

    def type_error(self, argument: str, found: object, supported: str) -> TypeError:
        """The same as a TypeError."""
        return TypeError(f"adjcomp.ops.{self.op}: argument `{argument}` is {found}; supported: {supported}")

    def bind(self, letter: str, size: Size) -> None:
        """Fix the size of a dimension that no earlier argument shows (e.g. the convolution's tail)."""
        self.sizes[letter] = size

    def tensor(self, argument: str, value: Tensor, dims: str, kind: Kind = Kind.REAL) -> None:
        """Check dtype, device, rank and every size of a required tensor; `dims` are letters separated by blanks."""
        if not isinstance(value, Tensor):
            raise self.type_error(argument, f"a {type(value).__name__}", f"a tensor ({', '.join(dims.split())})")
        if value.dtype not in kind.value:
            raise self.type_error(argument, f"of dtype {str(value.dtype).removeprefix('torch.')}", kind.text)
        self._check_device(argument, value)
        self._check_shape(argument, value, dims.split())

    def optional(self, argument: str, value: Tensor | None, dims: str, kind: Kind = Kind.REAL) -> None:
        """As `tensor`, for an argument that may be None."""
        if value is not None:
            self.tensor(argument, value, dims, kind)

    def _check_device(self, argument: str, value: Tensor) -> None:
        if self.device is None:
            self.device, self.device_owner = value.device, argument
        elif value.device != self.device:
            raise self.error(argument, f"on {value.device}", f"the device of `{self.device_owner}`, {self.device}")

    def _check_shape(self, argument: str, value: Tensor, dims: list[str]) -> None:
        found = tuple(value.shape)
        if len(found) != len(dims):
            raise self.error(argument, f"of shape {found}", f"({', '.join(dims)})")
        for letter, size in zip(dims, found, strict=True):
            bound = self.sizes.setdefault(letter, size)
            if known_different(bound, size):
                wanted = ", ".join(f"{d}={self.sizes[d]}" if d in self.sizes else d for d in dims)
                raise self.error(argument, f"of shape {found}", f"({wanted})")
            if letter == "T" and isinstance(size, int) and size < 1:
                raise self.error(argument, f"of shape {found}, which has no time step", "T >= 1 (time is dimension 1)")
