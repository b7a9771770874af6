"""The compiled view of a model: an object of a subclass of the model's own class that shares the model's whole `__dict__`.

So `isinstance`, state_dict keys, `training`, save_pretrained and everything else see the model they know; only `forward` under
gradients runs a plan. The view's own state sits in a slot, beside the shared dictionary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from adjcomp.ir.plan import Plan
from adjcomp.session import Session
from adjcomp.stepping import Stats

_SLOT = "_adjcomp_session"


def session_of(compiled: torch.nn.Module) -> Session:
    """The session behind a compiled view."""
    session: Session = object.__getattribute__(compiled, _SLOT)
    return session


class CompiledMethods:
    """What a compiled view adds to the model's class."""

    @property
    def plan(self) -> Plan:
        """The plan of the last shape; RuntimeError before the first call."""
        found = session_of(self).last_plan  # type: ignore[arg-type]
        if found is None:
            raise RuntimeError("no plan yet: call the model once, or use plan_for(batch_size=…, seq_len=…)")
        return found

    @property
    def stats(self) -> Stats:
        """Budget, predicted and measured peak, and seconds of the last step; RuntimeError before the first call."""
        found = session_of(self).last_stats  # type: ignore[arg-type]
        if found is None:
            raise RuntimeError("no step has run yet")
        return found

    def plan_for(
        self, *, batch_size: int = 1, seq_len: int, example_inputs: tuple[Any, ...] | dict[str, Any] | None = None
    ) -> Plan:
        """The plan for a shape, without running it. Where forward isn't `(input_ids, labels)`, give `example_inputs` of that
        shape.
        """
        args, kwargs = example_call(self, batch_size, seq_len, example_inputs)  # type: ignore[arg-type]
        return session_of(self).plan_for(args, kwargs)  # type: ignore[arg-type]

    def warmup(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Plan for several (batch_size, seq_len) now rather than at their first step."""
        for batch_size, seq_len in shapes:
            self.plan_for(batch_size=batch_size, seq_len=seq_len)


def example_call(
    model: torch.nn.Module, batch_size: int, seq_len: int, example_inputs: tuple[Any, ...] | dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the given shape: the example, or token ids (and labels where forward takes them)."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if example_inputs is not None:
        return tuple(example_inputs), {}
    device = next(model.parameters()).device
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device)
    names = list(inspect.signature(model.forward).parameters)
    if "input_ids" in names:
        return (), {"input_ids": ids, **({"labels": ids.clone()} if "labels" in names else {})}
    if "labels" in names:
        return (ids, ids.clone()), {}
    return (ids,), {}


_VIEWS: dict[type, type] = {}


def _view_class(kind: type) -> type:
    """The subclass that compiled views of `kind` belong to."""
    if kind not in _VIEWS:
        _VIEWS[kind] = _make_view_class(kind)
    return _VIEWS[kind]


def _make_view_class(kind: Any) -> type:
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        if not torch.is_grad_enabled() or not session.wants_gradient(args, kwargs):
            return plain(self, *args, **kwargs)
        return session.run(args, kwargs)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    namespace = {
        "__slots__": (_SLOT,),
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (CompiledMethods, kind), namespace)


def make_view(session: Session) -> torch.nn.Module:
    """A compiled view of the session's model."""
    model = session.model
    view: Any = object.__new__(_view_class(type(model)))
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, _SLOT, session)
    made: torch.nn.Module = view
    return made
