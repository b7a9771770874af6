"""How a kernel is launched: on the stream of its tensors' device, or only noted down for a compilation ahead of time.

A kernel takes its tensors as pointers without offsets, sizes and strides as integers, and constants by name. `None` for a tensor
is a constant to Triton, so that a kernel asks `if z is not None` while it is compiled and pays nothing for what isn't there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjcomp.runtime.kernels.triton.configs import Config

TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}
ALIGNMENT = 16  # what Triton's own specialisation looks for in addresses (bytes) and integers
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """One launch as a compiler sees it."""

    kernel: Any
    signature: Mapping[str, str]  # argument -> Triton's name of its type, "constexpr" for constants
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]  # arguments that are multiples of 16
    config: Config

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


_recorder: list[Launch] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note launches instead of running them; tensors may then be on any device, `meta` too."""
    global _recorder
    before, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = before


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Run `kernel` over `grid` with the configuration's constants; a grid without programs is left out."""
    if 0 in grid:
        return
    if _recorder is not None:
        _recorder.append(_describe(kernel, arguments, config))
        return
    first = next(value for value in arguments.values() if isinstance(value, Tensor))
    with torch.cuda.device_of(first):
        kernel[grid](**arguments, **config.constants, **config.options(torch.version.hip is None))


def _describe(kernel: Any, arguments: Mapping[str, Any], config: Config) -> Launch:
    values = {**arguments, **config.constants}
    signature, constants, aligned = {}, {}, []
    for parameter in kernel.params:
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _type_name(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % ALIGNMENT == 0):
            aligned.append(parameter.name)
    return Launch(kernel, signature, constants, tuple(aligned), config)


def _type_name(value: Any) -> str:
    """Triton's name of an argument's type; None and 1 are constants, as in a launch."""
    if isinstance(value, Tensor):
        return "*" + TYPE_NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        return "constexpr"
    return "i64" if abs(value) > INT32_MAX else "i32"
