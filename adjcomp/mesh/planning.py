"""One plan for all ranks: the first one makes it, the others get it as it would be saved."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adjcomp.budget import SHARDS, Held, outside_costs
from adjcomp.ir.plan import Plan
from adjcomp.ir.residency import Item, Residency
from adjcomp.joins import joins_of
from adjcomp.machine import Device, Machine, profile_links
from adjcomp.machine import Link as MachineLink
from adjcomp.mesh.agreement import Outcome
from adjcomp.mesh.dimensions import Layout
from adjcomp.options import Options
from adjcomp.passes.cost import CostModel, device_rates
from adjcomp.passes.split import KeepPolicy
from adjcomp.planning import PlanRequest, calibrated, make_executable, own_device
from adjcomp.residents import layer_residency
from adjcomp.runtime.mesh.link import Link
from adjcomp.runtime.mesh.sharded import is_sharded, part_bytes, shardings_of
from adjcomp.runtime.mesh.wholes import most_gathered
from adjcomp.runtime.values import accumulation_dtype

HOST_LINK = MachineLink(bandwidth=1.5e9, latency=1e-4)  # Gloo between processes of one computer
_PLAN, _ERROR = b"P", b"E"


@dataclass(frozen=True)
class RanksRequest:
    """What a plan for several ranks is wanted for.

    request: for one of them; its budget holds for each. whole: stand-ins for the whole model, wherever its parameters are. own:
        parameters as they are here, for timing. optimizer: bytes of optimizer state by parameter.
    """

    request: PlanRequest
    whole: Held
    own: Held
    layout: Layout
    optimizer: Mapping[str, int]
    owned: tuple[tuple[int, int] | None, ...] | None = None  # layers of each stage, where an earlier plan has put them


def plan_for_ranks(wanted: RanksRequest) -> Plan:
    """The plan, made on this rank. Raises BudgetError."""
    from adjcomp.passes.place import solve_machine

    request, ranks = wanted.request, wanted.layout.ranks
    if request.saved is not None:
        return request.saved
    if len(ranks) == 1:
        return make_executable(replace(request, held=wanted.own)).plan
    options = replace(request.options, placement=wanted.layout.placement or (None if wanted.owned is None else "layers"))
    return solve_machine(
        [_form(wanted, policy, options) for policy in (KeepPolicy.FULL, KeepPolicy.LEAN)],
        machine=machine_of(own_device(wanted.own), ranks),
        seq_len=request.seq_len,
        budget_bytes=request.budget_bytes,
        candidates=request.candidates,
        options=options,
        shape=wanted.layout.shape,
        owned=wanted.owned,
        long_candidates=request.long_candidates,
    )


def stand_ins(held: Held, accumulated: bool) -> Held:
    """The same tensors without memory; with gradients where they are accumulated, whichever rank has them.

    A sharded parameter is whole here, as it is during a step; its part and its rows of the gradient are beside it.
    """
    parameters: dict[str, torch.Tensor] = {}
    beside = {name: part_bytes([p]) + _rows_bytes(p) for name, p in held.parameters.items() if is_sharded(p)}
    for name, parameter in held.parameters.items():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        made = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
        if accumulated and parameter.requires_grad and name not in beside:
            made.grad = torch.empty_like(made)
        parameters[name] = made
    buffers = {name: torch.empty_like(buffer, device="meta") for name, buffer in held.buffers.items()}
    return Held(parameters, buffers, held.inputs, 0, beside)


def beside_parts(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that a step holds beside this rank's parts of sharded parameters: the wholes, and the parts of their gradients."""
    return {
        name: parameter.numel() * parameter.element_size() + part_bytes([parameter])
        for name, parameter in parameters.items()
        if is_sharded(parameter)
    }


def _rows_bytes(parameter: torch.Tensor) -> int:
    """Bytes of this rank's rows of a gradient while they are added up."""
    return part_bytes([parameter]) // parameter.element_size() * accumulation_dtype(parameter.dtype).itemsize


def machine_of(own: Device, ranks: Sequence[int]) -> Machine:
    """The ranks as devices like this one; those of one computer follow each other in the numbering."""
    per_node = len(ranks) if own.kind == "cpu" else max(1, torch.cuda.device_count())
    nodes = [rank // per_node if own.kind != "cpu" else 0 for rank in ranks]
    devices = tuple(replace(own, name=f"rank {rank}", node=node) for rank, node in zip(ranks, nodes, strict=True))
    inside, network = (HOST_LINK, HOST_LINK) if own.kind == "cpu" else profile_links(own.profile)
    return Machine(f"{len(ranks)} ranks", devices, dict.fromkeys(sorted(set(nodes)), inside), network)


def share_plan(link: Link, make: Callable[[], Plan]) -> Plan:
    """The plan that the first rank makes, on all ranks; an error of that rank is raised on all."""
    outcome, made = Outcome(), []
    if link.watch.own == link.circle.ranks[0]:
        with outcome, link.watch.busy():
            made.append(make())
    payload = (
        _ERROR + _pickled(outcome.error) if outcome.error is not None else _PLAN + (made[0].to_json().encode() if made else b"")
    )
    data = link.spread(payload, link.circle, "the plan")
    if data[:1] == _PLAN:
        return made[0] if made else Plan.from_json(data[1:].decode())
    if outcome.error is not None:
        raise outcome.error
    raise pickle.loads(data[1:])


def _pickled(error: Exception) -> bytes:
    """The error itself where it can travel, else what it says."""
    try:
        return pickle.dumps(error)
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _form(wanted: RanksRequest, policy: KeepPolicy, options: Options) -> tuple[CostModel, Residency]:
    """Costs and residents of tiles that keep what `policy` says."""
    request = wanted.request
    stack, splits = request.captured.stack, request.captured.splits(policy)
    outside = outside_costs(stack, splits, wanted.whole, request.side_bytes, request.seq_len)
    joins = joins_of(request.captured, splits, options, len(wanted.layout.ranks))
    model = CostModel(stack, splits, request.seq_len, outside, device_rates(own_device(wanted.own)), policy, joins=joins)
    model = calibrated(model, wanted.own, request.options)
    own = layer_residency(stack, splits, wanted.whole, wanted.optimizer, request.side_bytes, request.seq_len)
    shardings = shardings_of(wanted.own.parameters)
    rooms = {name: sharding.room_bytes(wanted.own.parameters[name].dtype) for name, sharding in shardings.items()}
    rows = {name: _rows_bytes(wanted.own.parameters[name]) for name in rooms}
    return model, with_outputs_everywhere(gathered_by_layer(own, rooms, rows, len(wanted.layout.ranks)))


def gathered_by_layer(residency: Residency, rooms: Mapping[str, int], rows: Mapping[str, int], ranks: int) -> Residency:
    """Sharded parameters are whole a few layers at a time, and have gone when gradients are added up.

    rooms: bytes of each whole by name. rows: those of this rank's rows of its gradient, which are beside the parts.
    """
    if not rooms:
        return residency
    owned = [{item.name for item in layer if item.kind == "parameters"} & rooms.keys() for layer in residency.layers]
    most = most_gathered([{name: rooms[name] for name in names} for names in owned], ranks)
    room = Item("wholes", "parameters", max(most, sum(rows.values())), False)

    def left(layer: tuple[Item, ...]) -> tuple[Item, ...]:
        kept = (item for item in layer if item.kind != "parameters" or item.name not in rooms)
        return (*(replace(i, size=i.size - rows[i.name]) if i.kind == SHARDS else i for i in kept), room)

    return Residency(tuple(left(layer) for layer in residency.layers))


def with_outputs_everywhere(residency: Residency) -> Residency:
    """Per-token outputs are whole on every rank: a loss outside of the model is computed on each, from equal values."""
    outputs: dict[Item, None] = {}
    for layer in residency.layers:
        outputs.update(dict.fromkeys(item for item in layer if item.kind.startswith("output")))
    return Residency(tuple((*layer, *(item for item in outputs if item not in layer)) for layer in residency.layers))
