"""What a compiled model remembers: captures by key, plans by shape, and the figures of the last step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adjcomp.budget import Held, check_budget, free_bytes
from adjcomp.errors import BudgetError, CaptureError
from adjcomp.ir.executable import Executable
from adjcomp.ir.interpret import GradInterpreter
from adjcomp.ir.plan import Plan
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.keys import capture_key, check_leaves
from adjcomp.mesh.facts import call_facts
from adjcomp.mesh.planning import RanksRequest, plan_for_ranks, stand_ins
from adjcomp.mesh.spread import Spread
from adjcomp.optimizers import optimizer_bytes, optimizer_bytes_by_name
from adjcomp.options import Options
from adjcomp.passes.calls import CallTensors, describe_call
from adjcomp.passes.chunks import candidate_chunks
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.planning import PlanRequest, make_executable
from adjcomp.progress import progress
from adjcomp.stepping import Stats, StepRequest, made_bytes, run_step
from adjcomp.variants import check_linear

CAPTURES_KEPT = 16
PLANS_KEPT = 64


@dataclass
class Session:
    """The state behind one compiled model."""

    model: torch.nn.Module
    mem_budget: int | str | None
    chunk: int | None
    options: Options
    optimizer: torch.optim.Optimizer | str | None = None
    saved_plan: Plan | None = None
    variant: Variant = EXACT
    spread: Spread | None = None  # the other ranks, under a mesh
    captures: OrderedDict[Any, Captured] = field(default_factory=OrderedDict)
    executables: OrderedDict[Any, Executable] = field(default_factory=OrderedDict)
    last_plan: Plan | None = None
    last_stats: Stats | None = None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call of the model under its plan: the model's own output, connected to autograd."""
        args, kwargs = _with_tensor_counts(args, kwargs)
        call, captured, accumulated = self._understood(args, kwargs)
        tensors = tuple(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor))
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        placeholders = [*state.values(), *tensors]
        made = GradInterpreter(captured.stack.prologue).run(*placeholders)
        sides, initial = made[: len(captured.stack.sides)], made[len(captured.stack.sides) :]
        held = self._held(tensors)
        executable = self._executable(captured, call, held, made_bytes(sides, tensors), accumulated)
        if self.spread is not None:
            self.spread.settle(executable, self.model)
            held = self._held(tensors)
        watched = {**state, **{entry.path: t for entry, t in zip(call.inputs, tensors, strict=True)}}
        request = StepRequest(executable, state, watched, tensors, sides, initial, held, self.optimizer, self.spread)
        results = run_step(request, self._record)
        outputs = GradInterpreter(captured.stack.epilogue).run(*placeholders, *results)
        _update(captured, watched, outputs)
        return _assemble(captured, outputs)

    def _understood(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallTensors, Captured, bool]:
        """The call, its capture, and whether gradients are accumulated; under a mesh, once all ranks understand the same."""

        def make() -> tuple[CallTensors, Captured]:
            call = describe_call(args, kwargs)
            check_leaves(call)
            return call, self.captured(args, kwargs, call)

        if self.spread is None:
            return (*make(), False)
        (call, captured), accumulated = self.spread.understand(
            make, lambda made: call_facts(self.model, *made, self.saved_plan), lambda _: self._accumulates()
        )
        return call, captured, accumulated

    def _accumulates(self) -> bool:
        return any(p.grad is not None for p in self.model.parameters())

    def _record(self, stats: Stats) -> None:
        self.last_stats = stats

    def wants_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether anything in a call takes a gradient; without that the plain forward serves."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        return any(p.requires_grad for p in self.model.parameters()) or any(t.requires_grad for t in tensors)

    def captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: CallTensors) -> Captured:
        """The capture for this call, from the cache where the key is equal.

        A length at which the model branches otherwise has its own.
        """
        general = ((capture_key(self.model, call), self.variant.at(call.seq_len)), None)
        self._capture(general, args, kwargs)
        regimes = [key for key in self.captures if key[0] == general[0] and self.captures[key].holds_at(call.seq_len)]
        key = regimes[0] if regimes else (general[0], call.seq_len)
        self._capture(key, args, kwargs)
        _check_guards(self.captures[key], call.seq_len)
        return self.captures[key]

    def _capture(self, key: tuple[Any, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if key not in self.captures:
            _check_devices(self.model)
            variant: Variant = key[0][1]
            check_linear(self.model, variant)
            with progress(f"capturing {type(self.model).__name__}"):
                self.captures[key] = run_capture(self.model, args, kwargs, hint=key[1], variant=variant)
            if len(self.captures) > CAPTURES_KEPT:
                self.captures.popitem(last=False)
        self.captures.move_to_end(key)

    def plan_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """The plan of a call's shape; nothing is run."""
        return self.executable_for(args, kwargs).plan

    def executable_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable:
        """The plan of a call's shape with its programs."""
        args, kwargs = _with_tensor_counts(args, kwargs)
        call, captured, accumulated = self._understood(args, kwargs)
        tensors = tuple(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor))
        side_bytes = made_side_bytes(captured, call.seq_len)
        return self._executable(captured, call, self._held(tensors), side_bytes, accumulated)

    def _held(self, tensors: tuple[torch.Tensor, ...]) -> Held:
        """What is on this rank; the optimizer counts parameters that are elsewhere only as far as it holds state for them."""
        coming = optimizer_bytes(self.optimizer, self.model.parameters())
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if self.spread is not None:
            parameters = {name: parameters[name] for name in self.spread.local(parameters)}
            buffers = {name: buffers[name] for name in self.spread.local(buffers)}
        return Held(parameters, buffers, tensors, coming)

    def _executable(self, captured: Captured, call: CallTensors, held: Held, side_bytes: int, accumulated: bool) -> Executable:
        resident = (accumulated,) if self.spread is not None else tuple(sorted(held.resident_bytes().items()))
        key = (id(captured.stack), call.seq_len, side_bytes, resident)
        if key not in self.executables:
            with progress(f"planning {call.batch_size} x {call.seq_len} tokens"):
                self.executables[key] = self._plan(captured, call, held, side_bytes, accumulated)
            if len(self.executables) > PLANS_KEPT:
                self.executables.popitem(last=False)
        self.executables.move_to_end(key)
        found = self.executables[key]
        self.last_plan = found.plan
        return found

    def _plan(self, captured: Captured, call: CallTensors, held: Held, side_bytes: int, accumulated: bool) -> Executable:
        device = next(iter(held.parameters.values())).device
        budget = check_budget(self.mem_budget, device)
        if budget is None:
            budget = free_bytes(device, sum(held.resident_bytes().values()))
            if self.spread is not None and device.type == "cpu":
                budget //= len(self.spread.layout.ranks)  # the ranks share this computer's memory
        candidates = self._candidates(call.seq_len, device)
        request = PlanRequest(
            captured, call.seq_len, held, side_bytes, budget, candidates, str(device), self.options, self.saved_plan
        )
        try:
            return make_executable(request) if self.spread is None else self._shared(request, self.spread, accumulated)
        except BudgetError as error:
            shape = f"batch size {call.batch_size}, sequence length {call.seq_len}"
            raise BudgetError(error.requested_bytes, error.minimum_bytes, error.contributors, subject=shape) from None

    def _shared(self, request: PlanRequest, spread: Spread, accumulated: bool) -> Executable:
        """The first rank's plan, with the programs of its tiles on this rank."""
        everything = Held(dict(self.model.named_parameters()), dict(self.model.named_buffers()), request.held.inputs, 0)
        whole = stand_ins(everything, accumulated)
        state = optimizer_bytes_by_name(self.optimizer, dict(self.model.named_parameters()))
        wanted = RanksRequest(request, whole, everything, spread.layout, state)
        plan = spread.plan(lambda: plan_for_ranks(wanted))
        return make_executable(replace(request, held=whole, saved=plan))

    def _candidates(self, seq_len: int, device: torch.device) -> list[int]:
        if self.chunk is not None:
            return [min(self.chunk, seq_len)]
        return candidate_chunks(seq_len, "cpu" if device.type == "cpu" else "cuda")


def _with_tensor_counts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`num_items_in_batch` differs from step to step: as a tensor it is an input, as a number it would be a constant of the
    trace.
    """
    changed = dict(kwargs)
    count = changed.get("num_items_in_batch")
    if isinstance(count, int | float) and not isinstance(count, bool):
        changed["num_items_in_batch"] = torch.tensor(count)
    return args, changed


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


def made_side_bytes(captured: Captured, seq_len: int) -> int:
    """Bytes of all sides that the prologue makes for a sequence of this length."""
    return sum(_side_bytes(captured, i, seq_len) for i in range(len(captured.stack.sides)))


def _side_bytes(captured: Captured, index: int, seq_len: int) -> int:
    """Bytes of a side that the prologue makes; 0 for one that is an input as it stands."""
    from adjcomp.passes.sizes import number_of_bytes

    results = next(n for n in captured.stack.prologue.graph.nodes if n.op == "output").args[0]
    node = results[index]
    return 0 if node.op == "placeholder" else number_of_bytes(node.meta["val"], captured.traced.time, seq_len)


def _update(captured: Captured, watched: Mapping[str, torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> None:
    """Give the buffers and inputs that the model changes in forward their new values, once a forward."""
    updates = captured.stack.updates
    with torch.no_grad():
        for name, value in zip(updates, outputs[len(outputs) - len(updates) :], strict=True):
            watched[name].copy_(value)


def _assemble(captured: Captured, outputs: tuple[torch.Tensor, ...]) -> Any:
    rest = iter(outputs)
    count = sum(leaf.tensor is not None for leaf in captured.traced.output_leaves)
    by_index = {i: None if i in captured.stack.dropped_outputs else next(rest) for i in range(count)}
    leaves = [leaf.value if leaf.tensor is None else by_index[leaf.tensor] for leaf in captured.traced.output_leaves]
    return pytree.tree_unflatten(leaves, captured.traced.output_spec)
