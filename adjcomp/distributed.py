"""Companions of `compile(model, mesh=…)` for a training script: placing parameters early, reading a rank's own tokens, and the
state that a rank saves with torch.distributed.checkpoint.

Every function that plans is called by all ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from adjcomp.compiled import example_call, session_of
from adjcomp.ir.actions import Forward, Loss
from adjcomp.ir.plan import Plan
from adjcomp.mesh.spread import Spread
from adjcomp.session import Session

Example = tuple[Any, ...] | dict[str, Any]


class Tokens(Protocol):
    """Token ids (B, T) that can be sliced along time without reading the rest: a tensor, or a numpy memory map."""

    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        """A part of them."""


def place(compiled: torch.nn.Module, *, batch_size: int = 1, seq_len: int, example_inputs: Example | None = None) -> Plan:
    """Plan for a shape and put every parameter where the plan wants it, before the first step.

    Under "layers" a rank keeps the parameters of its own layers; the others' memory is freed. Returns the plan.
    """
    session, spread = _session(compiled)
    args, kwargs = example_call(compiled, batch_size, seq_len, example_inputs)
    executable = session.executable_for(args, kwargs)
    spread.settle(executable, session.model)
    return executable.plan


def token_range(compiled: torch.nn.Module, *, batch_size: int = 1, seq_len: int, example_inputs: Example | None = None) -> range:
    """From the first to the last token that this rank's part of the plan reads: its own under "time", all of them under "layers".

    In a grid a rank takes turns with others: see `token_ranges`.
    """
    spans = token_ranges(compiled, batch_size=batch_size, seq_len=seq_len, example_inputs=example_inputs)
    return range(spans[0].start, spans[-1].stop) if spans else range(0)


def token_ranges(
    compiled: torch.nn.Module, *, batch_size: int = 1, seq_len: int, example_inputs: Example | None = None
) -> tuple[range, ...]:
    """The tokens that this rank's part of the plan reads, in order: one range, or in a grid one for each of its chunks."""
    session, spread = _session(compiled)
    args, kwargs = example_call(compiled, batch_size, seq_len, example_inputs)
    plan = session.executable_for(args, kwargs).plan
    forwards = (action for action in plan.actions if isinstance(action, Forward | Loss) and action.device == spread.place)
    spans: list[range] = []
    for chunk in sorted({action.chunk for action in forwards}):
        start, stop = chunk * plan.chunk, min((chunk + 1) * plan.chunk, seq_len)
        joined = bool(spans) and spans[-1].stop == start
        spans[-1 if joined else len(spans) :] = [range(spans[-1].start if joined else start, stop)]
    return tuple(spans)


def read_tokens(source: Tokens, span: range | Sequence[range], *, ahead: int = 1) -> torch.Tensor:
    """Token ids (B, T) for a call on this rank: those of `span`, or of several spans, from `source`; zeros elsewhere.

    ahead: how many tokens after a range a rank needs besides: one where labels are the ids shifted by one, so that the last
        label of a range is right.
    """
    batch, length = int(source.shape[0]), int(source.shape[1])
    ids = torch.zeros(batch, length, dtype=torch.int64)
    for own in [span] if isinstance(span, range) else span:
        if len(own):
            end = min(own.stop + ahead, length)
            ids[:, own.start : end] = torch.as_tensor(source[:, own.start : end], dtype=torch.int64)
    return ids


def local_state(compiled: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """What this rank saves and loads: its parameters and buffers ("model.…") and its optimizer's tensors ("optimizer.….…").

    A flat dictionary for `torch.distributed.checkpoint`'s save and load. Names are the model's, so a checkpoint can be
    loaded on another number of ranks. An optimizer that hasn't stepped yet gets its state first (by a step of length zero), so
    that loading has a place to write to.
    """
    session, spread = _session(compiled)
    model = session.model
    if spread.homes is None:
        raise RuntimeError("it isn't decided yet which parameters are on this rank: call place() or run a step first")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {f"model.{name}": tensors[name].detach() for name in spread.local(tensors)}
    if optimizer is not None:
        _make_state(optimizer, spread, model)
        found.update(_optimizer_tensors(optimizer, model))
    return found


def _session(compiled: torch.nn.Module) -> tuple[Session, Spread]:
    session = session_of(compiled)
    if session.spread is None:
        raise RuntimeError("this model was compiled without a mesh: one process has everything")
    return session, session.spread


def _optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and id(parameter) in names:
                yield f"optimizer.{names[id(parameter)]}.{key}", value


def _make_state(optimizer: torch.optim.Optimizer, spread: Spread, model: torch.nn.Module) -> None:
    """The state of an optimizer that hasn't stepped: a step with zero gradients and a learning rate of zero makes it."""
    if optimizer.state:
        return
    parameters = dict(model.named_parameters())
    local = [parameters[name] for name in spread.local(parameters) if parameters[name].requires_grad]
    held = [parameter.grad for parameter in local]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in local:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(local, held, strict=True):
        parameter.grad = grad
