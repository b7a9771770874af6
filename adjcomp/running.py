"""One call of a compiled model: prologue, step under its plan, epilogue, and the model's own output from what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adjcomp.caches import is_cache, state_of
from adjcomp.casting import recorded_casts
from adjcomp.ir.executable import Executable
from adjcomp.ir.interpret import GradInterpreter
from adjcomp.keys import TRAINING, CallKind, Stream
from adjcomp.passes.pipeline import Captured
from adjcomp.session import Session, Understood, with_tensor_counts
from adjcomp.state import State, check_state
from adjcomp.stepping import StepRequest, made_bytes, run_step

Tensor = torch.Tensor


def run_call(session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind = TRAINING) -> Any:
    """The model's own output, connected to autograd."""
    output, _ = _run(session, args, kwargs, kind, None)
    return output


def run_piece(
    session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any], initial: Any, *, gradients: bool
) -> tuple[Any, State]:
    """A piece of a stream: the model's own output, and the state from which the next piece goes on.

    initial: the State that the piece before left, or the model's own inference cache; None where the stream starts. Raises
    TypeError for anything else, ValueError for a state of another model or batch size.
    """
    if not (initial is None or isinstance(initial, State) or is_cache(initial)):
        raise TypeError(
            f"initial_state is what a piece before returned, an inference cache or None, not {type(initial).__name__}"
        )
    session.check_whole()
    if session.spread is not None:
        raise ValueError("a call with initial_state runs on one device: a mesh takes whole sequences")
    frozen = any(not p.requires_grad for p in session.model.parameters())
    wants = gradients and frozen and isinstance(initial, State) and any(tensor.requires_grad for tensor in initial)
    kind = CallKind(gradients, wants, Stream.FIRST if initial is None else Stream.CONTINUED)
    output, state = _run(session, args, kwargs, kind, initial)
    assert state is not None
    return output, state


def _run(
    session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind, initial: Any
) -> tuple[Any, State | None]:
    args, kwargs = with_tensor_counts(args, kwargs)
    found = session.understood(args, kwargs, kind)
    with recorded_casts():
        return _step(session, found, initial)


def _step(session: Session, found: Understood, initial: Any) -> tuple[Any, State | None]:
    call, captured = found.call, found.captured
    piece, stack = captured.piece, captured.stack
    if initial is not None and piece is not None:
        initial = initial if isinstance(initial, State) else state_of(initial, piece)
        check_state(initial, piece)
    tensors = tuple(leaf for leaf in call.leaves if isinstance(leaf, Tensor))
    state = {**dict(session.model.named_parameters()), **dict(session.model.named_buffers())}
    placeholders = [*state.values(), *tensors]
    made = GradInterpreter(stack.prologue).run(*placeholders)
    sides, starts = made[: len(stack.sides)], (*made[len(stack.sides) :], *(initial or ()))
    held = session.held((*tensors, *(initial or ())))
    made_here = made_bytes(sides, tensors)
    executable = session.executable(found, held, made_here)
    if session.spread is not None:
        session.spread.check_sides(executable)
        session.spread.settle(executable, session.model)
        held = session.held(tensors)

    def smaller(budget_bytes: int) -> Executable:
        session.ceiling_bytes = budget_bytes
        return session.executable(found, held, made_here)

    watched = {**state, **{entry.path: t for entry, t in zip(call.inputs, tensors, strict=True)}}
    request = StepRequest(
        executable,
        state,
        watched,
        tensors,
        sides,
        starts,
        held,
        session.optimizer,
        session.spread,
        smaller,
        session.options.adjoint_norms,
        session.recordings_for(executable),
        session.options.deterministic,
    )
    results = run_step(request, session.record)
    finals = results[len(stack.sums) + len(stack.outs) :]
    own = len(results) if piece is None else len(results) - len(finals) + piece.own_finals
    outputs = GradInterpreter(stack.epilogue).run(*placeholders, *results[:own])
    _update(captured, watched, outputs)
    left = None if piece is None else State(piece.names, tuple(finals[i] for i in piece.finals))
    return _assemble(captured, outputs), left


def _update(captured: Captured, watched: Mapping[str, Tensor], outputs: tuple[Tensor, ...]) -> None:
    """Give the buffers and inputs that the model changes in forward their new values, once a forward."""
    updates = captured.stack.updates
    with torch.no_grad():
        for name, value in zip(updates, outputs[len(outputs) - len(updates) :], strict=True):
            watched[name].copy_(value)


def _assemble(captured: Captured, outputs: tuple[Tensor, ...]) -> Any:
    rest = iter(outputs)
    count = sum(leaf.tensor is not None for leaf in captured.traced.output_leaves)
    by_index = {i: None if i in captured.stack.dropped_outputs else next(rest) for i in range(count)}
    leaves = [leaf.value if leaf.tensor is None else by_index[leaf.tensor] for leaf in captured.traced.output_leaves]
    return pytree.tree_unflatten(leaves, captured.traced.output_spec)
