"""The compiled view of a model: an object of a subclass of the model's own class that shares the model's whole `__dict__`.

So `isinstance`, state_dict keys, `training`, save_pretrained and everything else see the model they know; only `forward` under
gradients runs a plan. The view's own state sits in a slot, beside the shared dictionary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch._compile import _disable_dynamo

from adjcomp.caches import cache_of
from adjcomp.evaluation import evaluation_call, prefill_options, token_losses
from adjcomp.ir.plan import Plan
from adjcomp.keys import EVALUATION, TRAINING
from adjcomp.running import run_call, run_piece
from adjcomp.session import Session
from adjcomp.stepping import Stats

_SLOT = "_adjcomp_session"
_ASSIGNED = "_adjcomp_forward"  # what was assigned to `forward`, or None
PIECE = "initial_state"  # the keyword that makes a call a piece of a stream


def session_of(compiled: torch.nn.Module) -> Session:
    """The session behind a compiled view."""
    session: Session = object.__getattribute__(compiled, _SLOT)
    return session


def plain_call(session: Session) -> Callable[..., Any]:
    """What runs a model's own forward; that of a sharded model needs the hooks of FSDP around it."""
    sharded = session.spread is not None and session.spread.shardings
    return session.model if sharded else session.model.forward


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

    def prefill(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        """The model's own inference cache after `input_ids` (B, T), of any length: they run chunk by chunk without gradients.

        `compiled.generate(ids, cache=compiled.prefill(ids[:, :-1]))` goes on from there. TypeError for a model without one.
        """
        session = session_of(self)  # type: ignore[arg-type]
        if "use_cache" not in inspect.signature(session.model.forward).parameters:
            raise TypeError(f"{type(session.model).__name__} takes no use_cache: it has no inference cache to fill")
        with torch.no_grad():
            _, state = run_piece(
                session, (), {"input_ids": input_ids, **inputs, **prefill_options(session)}, None, gradients=False
            )
        return cache_of(session.model, state, input_ids)

    def nll(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Negative log-likelihood of each token given those before it, (B, T - 1) float32, in nats: no (T, vocabulary) value is
        ever held, whatever T is. `exp(nll.mean())` is the perplexity. inputs: further arguments of forward, such as a mask.
        """
        return token_losses(session_of(self), input_ids, inputs)  # type: ignore[arg-type]


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


class _Forward:
    """`forward` of a view. What is assigned to it (Accelerate wraps it so) stays with the view: the dictionary is the original's.

    On the class it is the function itself, whose signature trainers read.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, view: Any, owner: type) -> Callable[..., Any]:
        if view is None:
            return self.function
        assigned: Callable[..., Any] | None = object.__getattribute__(view, _ASSIGNED)
        return MethodType(self.function, view) if assigned is None else assigned

    def __set__(self, view: Any, function: Callable[..., Any]) -> None:
        object.__setattr__(view, _ASSIGNED, function)

    def __delete__(self, view: Any) -> None:
        object.__setattr__(view, _ASSIGNED, None)


def _make_view_class(kind: Any) -> type:
    plain = kind.forward
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        gradients = torch.is_grad_enabled() and session.wants_gradient(args, kwargs)
        if PIECE in kwargs and PIECE not in signature.parameters:
            initial = kwargs.pop(PIECE)
            return run_piece(session, args, kwargs, initial, gradients=gradients)
        if gradients:
            return run_call(session, args, kwargs)
        evaluated = evaluation_call(signature, args, kwargs)
        if evaluated is None:
            session.check_whole()
            return plain_call(session)(*args, **kwargs)
        return run_call(session, args, evaluated, EVALUATION if session.spread is None else TRAINING)

    outside_of_dynamo = _disable_dynamo(forward)  # torch.compile around a call: the call itself is one step of a plan
    outside_of_dynamo.__signature__ = signature  # type: ignore[attr-defined]
    namespace = {
        "__slots__": (_SLOT, _ASSIGNED),
        "forward": _Forward(outside_of_dynamo),
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
    object.__setattr__(view, _ASSIGNED, None)
    made: torch.nn.Module = view
    return made
