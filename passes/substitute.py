"""Run a model on other tensors in place of its parameters and buffers, and put everything back.

`torch.func.functional_call` restores a module that occurs under two names from what it put there itself, so shared layers would
keep
the stand-ins; here every module is visited once and restored from a copy of what it held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from adjcomp.errors import CaptureError

# By this transformers remembers that a model has the hooks that collect outputs; it puts them in when they are first asked for.
_LASTING = "_output_capturing_hooks_installed"


@dataclass(frozen=True)
class _Held:
    """What a module held before: its attributes, and the contents of its tensor tables."""

    module: torch.nn.Module
    attributes: dict[str, object]
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]

    def restore(self) -> None:
        """Put back everything, whatever was assigned meanwhile."""
        lasting = {key: value for key, value in self.module.__dict__.items() if key == _LASTING}
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes, **lasting)
        for table, content in ((self.module._parameters, self.parameters), (self.module._buffers, self.buffers)):
            table.clear()
            table.update(content)  # type: ignore[arg-type]


@contextlib.contextmanager
def substituted(model: torch.nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put `stand_ins` (by the id of the tensor they stand for) into every module of `model`; restore all modules at the end."""
    held = [_Held(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for entry in held:
            for table in (entry.module._parameters, entry.module._buffers):
                table.update({name: stand_ins[id(t)] for name, t in table.items() if t is not None})  # type: ignore[misc]
        yield
    finally:
        for entry in held:
            entry.restore()


def reassigned_buffers(model: torch.nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers, by name, to which the model assigned another tensor than the one in `stand_ins`."""
    now = dict(model.named_buffers())
    missing = [name for name in stand_ins if name not in now]
    if missing:
        raise CaptureError(f"forward removes the buffer {missing[0]!r}")
    return {name: now[name] for name, given in stand_ins.items() if now[name] is not given}


def check_attributes(model: torch.nn.Module, before: Mapping[int, Mapping[str, object]]) -> None:
    """CaptureError when forward assigned an attribute: a compiled call runs no Python of the model, so it would not change."""
    for name, module in model.named_modules():
        known = before[id(module)]
        for key, value in vars(module).items():
            if key != _LASTING and (key not in known or (known[key] is not value and not _same(known[key], value))):
                raise CaptureError(
                    f"module {name or 'the root'!r} ({type(module).__name__}) assigns its attribute {key!r} in forward: "
                    "a compiled call would not. Keep what changes in a buffer, or set it outside of forward"
                )


def _same(old: object, new: object) -> bool:
    plain = (int, float, bool, str, type(None), tuple)
    return type(old) is type(new) and isinstance(old, plain) and bool(old == new)
