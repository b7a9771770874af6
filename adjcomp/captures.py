"""The captures of one model, by key: made when a call needs one, and used again for every call that is understood the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from adjcomp.errors import CaptureError
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.keys import TRAINING, CallKind, Stream, capture_key
from adjcomp.mesh.spread import Spread
from adjcomp.passes.calls import CallTensors
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.progress import progress
from adjcomp.variants import check_linear

CAPTURES_KEPT = 16

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass
class Captures:
    """What was captured of `model`; the oldest goes when there are too many."""

    model: torch.nn.Module
    variant: Variant = EXACT
    spread: Spread | None = None  # the other ranks, under a mesh
    by_key: OrderedDict[Any, Captured] = field(default_factory=OrderedDict)
    pieces: dict[tuple[int, bool], tuple[Captured, Captured]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.by_key)

    def of(self, arguments: CallArguments, call: CallTensors, kind: CallKind = TRAINING) -> Captured:
        """The capture for this call. A length at which the model branches otherwise has its own."""
        variant = self.variant.at(call.seq_len) if kind.gradients else EXACT
        general = ((capture_key(self.model, call, kind), variant), None)
        self._make(general, arguments, kind)
        regimes = [key for key, made in self.by_key.items() if key[0] == general[0] and made.holds_at(call.seq_len)]
        key = regimes[0] if regimes else (general[0], call.seq_len)
        self._make(key, arguments, kind)
        found = self.by_key[key]
        _check_guards(found, call.seq_len)
        return found if kind.stream is Stream.WHOLE else self._piece(found, given=kind.stream is Stream.CONTINUED)

    def reading(self) -> AbstractContextManager[object]:
        """For what reads shapes of parameters that may be on other ranks."""
        return nullcontext() if self.spread is None else self.spread.reading(self.model)

    def _make(self, key: tuple[Any, int | None], arguments: CallArguments, kind: CallKind) -> None:
        if key not in self.by_key:
            _check_devices(self.model)
            variant: Variant = key[0][1]
            if kind.gradients:
                check_linear(self.model, variant)
            with self.reading(), progress(f"capturing {type(self.model).__name__}"):
                self.by_key[key] = run_capture(
                    self.model,
                    *arguments,
                    hint=key[1],
                    variant=variant,
                    gradients=kind.gradients,
                    states=kind.state_gradients,
                    shapes=None if self.spread is None else self.spread.shapes,
                )
            if len(self.by_key) > CAPTURES_KEPT:
                self.by_key.popitem(last=False)
        self.by_key.move_to_end(key)

    def _piece(self, whole: Captured, *, given: bool) -> Captured:
        """The capture of a piece of a stream, made once for each capture of a whole one."""
        key = (id(whole), given)
        if key not in self.pieces:
            if len(self.pieces) >= CAPTURES_KEPT:
                self.pieces.clear()
            self.pieces[key] = (whole, whole.continued(given=given))
        return self.pieces[key][1]


def _check_devices(model: torch.nn.Module) -> None:
    devices: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        devices.setdefault(str(parameter.device), name)
    if len(devices) > 1:
        raise CaptureError(
            f"parameters are on several devices: {', '.join(f'{name} on {device}' for device, name in devices.items())}"
        )


def _check_guards(captured: Captured, seq_len: int) -> None:
    for guard in captured.traced.guards:
        if not bool(guard.xreplace({captured.traced.time: seq_len})):
            raise CaptureError(f"the model behaves differently at T = {seq_len}: the trace assumed {guard}")
