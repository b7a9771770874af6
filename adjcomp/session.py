"""What a compiled model remembers: its captures, plans by shape, and the figures of the last step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adjcomp.budget import Held, check_budget, free_bytes
from adjcomp.captures import Captures
from adjcomp.errors import BudgetError
from adjcomp.ir.executable import Executable
from adjcomp.ir.plan import Plan
from adjcomp.ir.variant import EXACT, Variant
from adjcomp.keys import TRAINING, CallKind, check_leaves
from adjcomp.mesh.facts import call_facts
from adjcomp.mesh.planning import RanksRequest, beside_parts, plan_for_ranks, stand_ins
from adjcomp.mesh.sharding import back_to_parts
from adjcomp.mesh.spread import Spread
from adjcomp.optimizers import optimizer_bytes, optimizer_bytes_by_name
from adjcomp.options import Options
from adjcomp.passes.aliasing import storage_root
from adjcomp.passes.calls import CallTensors, describe_call
from adjcomp.passes.chunks import candidate_chunks, long_chunks
from adjcomp.passes.pipeline import Captured
from adjcomp.planning import PlanRequest, make_evaluation, make_executable
from adjcomp.progress import progress
from adjcomp.runtime.cuda_graphs import recorder_for
from adjcomp.runtime.recording import Recordings
from adjcomp.shorter import serves, shortened
from adjcomp.stepping import Stats

PLANS_KEPT = 64


@dataclass(frozen=True)
class Understood:
    """A call, its capture, what is wanted of it, and whether some rank of a mesh holds gradients already."""

    call: CallTensors
    captured: Captured
    kind: CallKind
    accumulated: bool = False


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
    captures: Captures = field(init=False)
    executables: OrderedDict[Any, Executable] = field(default_factory=OrderedDict)
    scorer: Session | None = None
    ceiling_bytes: int | None = None  # the effective budget since the device ran out of memory
    recordings: Recordings | None = None
    last_plan: Plan | None = None
    last_stats: Stats | None = None

    def __post_init__(self) -> None:
        self.captures = Captures(self.model, self.variant, self.spread)

    def scoring(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Session:
        """A session of its own for what `wrap` computes around the model."""
        if self.scorer is None:
            self.scorer = Session(wrap(self.model), self.mem_budget, self.chunk, self.options)
        self.scorer.model.train(self.model.training)
        return self.scorer

    def understood(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind = TRAINING) -> Understood:
        """The call and its capture; under a mesh, once all ranks understand the same."""

        def make() -> tuple[CallTensors, Captured]:
            call = describe_call(args, kwargs)
            check_leaves(call)
            return call, self.captures.of((args, kwargs), call, kind)

        if self.spread is None:
            return Understood(*make(), kind)
        if self.spread.shardings:
            back_to_parts(self.model)
        made, accumulated = self.spread.understand(
            make, lambda made: call_facts(self.model, *made, self.saved_plan), lambda _: self._accumulates()
        )
        return Understood(*made, kind, accumulated)

    def _accumulates(self) -> bool:
        return any(p.grad is not None for p in self.model.parameters())

    def check_whole(self) -> None:
        """RuntimeError where parameters of the model are on other ranks: its plain forward can't run."""
        if self.spread is not None:
            self.spread.check_whole(self.model)

    def recordings_for(self, executable: Executable) -> Recordings | None:
        """The tiles that this session has recorded; made where an executable counts on them for the first time on a device."""
        device = next(self.model.parameters()).device
        if executable.recorded is not None and (self.recordings is None or self.recordings.device != device):
            self.recordings = Recordings(recorder_for(device), device)
        return self.recordings

    def record(self, stats: Stats) -> None:
        """Keep the figures of a step."""
        self.last_stats = stats

    def wants_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether anything in a call takes a gradient; without that the plain forward serves."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        return any(p.requires_grad for p in self.model.parameters()) or any(t.requires_grad for t in tensors)

    def plan_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """The plan of a call's shape; nothing is run."""
        return self.executable_for(args, kwargs).plan

    def executable_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable:
        """The plan of a call's shape with its programs."""
        args, kwargs = with_tensor_counts(args, kwargs)
        found = self.understood(args, kwargs)
        tensors = tuple(leaf for leaf in found.call.leaves if isinstance(leaf, torch.Tensor))
        request = self._request(found, self.held(tensors), made_side_bytes(found.captured, found.call.seq_len))
        return self._kept(self._key(request, found), found.kind, lambda: self._plan(request, found))

    def held(self, tensors: tuple[torch.Tensor, ...]) -> Held:
        """What is on this rank; the optimizer counts parameters that are elsewhere only as far as it holds state for them."""
        coming = optimizer_bytes(self.optimizer, self.model.parameters())
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if self.spread is not None:
            parameters = {name: parameters[name] for name in self.spread.local(parameters)}
            buffers = {name: buffers[name] for name in self.spread.local(buffers)}
        return Held(parameters, buffers, tensors, coming)

    def executable(self, found: Understood, held: Held, side_bytes: int) -> Executable:
        """What runs this call: from the cache where its shape and what is live around it were met before; made of a plan for a
        longer sequence, where that serves; else planned.
        """
        request = self._request(found, held, side_bytes)
        alone = found.kind.gradients and self.saved_plan is None and self.spread is None

        def make() -> Executable:
            return (self._served(request) if alone else None) or self._plan(request, found)

        return self._kept(self._key(request, found), found.kind, make)

    def _request(self, found: Understood, held: Held, side_bytes: int) -> PlanRequest:
        device = next(self.model.parameters()).device  # on a rank without layers nothing is held
        budget = check_budget(self.mem_budget, device)
        if budget is None:
            budget = free_bytes(device, sum(held.resident_bytes().values()))
            if self.spread is not None and device.type == "cpu":
                budget //= len(self.spread.layout.ranks)  # the ranks share this computer's memory
        if self.ceiling_bytes is not None:
            budget = min(budget, self.ceiling_bytes)
        length = found.call.seq_len
        candidates, long = self._chunks(length, "cpu" if device.type == "cpu" else "cuda")
        options = self.options if self.spread is None else replace(self.options, cuda_graphs=False)
        return PlanRequest(
            found.captured,
            length,
            held,
            side_bytes,
            budget,
            candidates,
            str(device),
            options,
            self.saved_plan,
            long_candidates=long,
            by_layer=self.spread is None,
        )

    def _key(self, request: PlanRequest, found: Understood) -> tuple[Any, ...]:
        resident = tuple(sorted(request.held.resident_bytes().items())) if self.spread is None else (found.accumulated,)
        return (id(request.captured.stack), request.seq_len, request.side_bytes, resident, self.ceiling_bytes)

    def _kept(self, key: tuple[Any, ...], kind: CallKind, make: Callable[[], Executable]) -> Executable:
        """The executable under `key`, made where it is new; the oldest goes when there are too many."""
        if key not in self.executables:
            self.executables[key] = make()
            if len(self.executables) > PLANS_KEPT:
                self.executables.popitem(last=False)
        self.executables.move_to_end(key)
        found = self.executables[key]
        if kind.gradients:
            self.last_plan = found.plan
        return found

    def _served(self, request: PlanRequest) -> Executable | None:
        """An executable from the plan of the next longer sequence that serves; None where there is none."""
        stack = request.captured.stack
        known = [e for e in self.executables.values() if e.stack is stack and serves(e.plan, request.seq_len)]
        return shortened(request, min(known, key=lambda e: e.plan.costs.seq_len)) if known else None

    def _plan(self, request: PlanRequest, found: Understood) -> Executable:
        shape = f"batch size {found.call.batch_size}, sequence length {found.call.seq_len}"
        try:
            with self.captures.reading(), progress(f"planning {found.call.batch_size} x {found.call.seq_len} tokens"):
                if not found.kind.gradients:
                    return make_evaluation(request)
                return make_executable(request) if self.spread is None else self._shared(request, self.spread, found.accumulated)
        except BudgetError as error:
            raise BudgetError(error.requested_bytes, error.minimum_bytes, error.contributors, subject=shape) from None

    def _shared(self, request: PlanRequest, spread: Spread, accumulated: bool) -> Executable:
        """The first rank's plan, with the programs of its tiles on this rank."""
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        own = Held(parameters, buffers, request.held.inputs, request.held.optimizer_bytes, beside_parts(parameters))
        whole = stand_ins(own, accumulated)
        state = optimizer_bytes_by_name(self.optimizer, parameters)
        wanted = RanksRequest(request, whole, own, spread.layout, state, spread.owned)
        plan = spread.plan(lambda: plan_for_ranks(wanted))
        return make_executable(replace(request, held=whole, saved=plan))

    def _chunks(self, seq_len: int, device_kind: str) -> tuple[list[int], list[int]]:
        """Chunk lengths to plan with, and further ones for ranges of time that are joined by summaries."""
        if self.chunk is not None:
            return [min(self.chunk, seq_len)], []
        if self.spread is None:
            return candidate_chunks(seq_len, device_kind), []
        ranks = len(self.spread.layout.ranks)
        return candidate_chunks(seq_len, device_kind, ranks), long_chunks(seq_len, device_kind, ranks)


def with_tensor_counts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`num_items_in_batch` differs from step to step: as a tensor it is an input, as a number it would be a constant of the
    trace.
    """
    changed = dict(kwargs)
    count = changed.get("num_items_in_batch")
    if isinstance(count, int | float) and not isinstance(count, bool):
        changed["num_items_in_batch"] = torch.tensor(count)
    return args, changed


def made_side_bytes(captured: Captured, seq_len: int) -> int:
    """Bytes of all sides that the prologue makes for a sequence of this length: of whole storages, each counted once."""
    from adjcomp.passes.sizes import number_of_bytes

    results = next(n for n in captured.stack.prologue.graph.nodes if n.op == "output").args[0]
    roots = dict.fromkeys(storage_root(node) for node in results[: len(captured.stack.sides)])
    return sum(number_of_bytes(n.meta["val"], captured.traced.time, seq_len) for n in roots if n.op != "placeholder")
