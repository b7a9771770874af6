"""From a captured model, a shape and a budget to something that runs: cost tables, plan, programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from adjcomp.budget import Held, outside_costs
from adjcomp.calibration import measured_times
from adjcomp.errors import BudgetError
from adjcomp.ir.costs import JoinCost, TileCost
from adjcomp.ir.executable import Executable
from adjcomp.ir.plan import HostTier, Plan
from adjcomp.ir.recording import RESIDENT_KIND, RecordingPolicy
from adjcomp.ir.variant import Coupling, Variant
from adjcomp.joins import joins_of
from adjcomp.machine import Device, Link, Machine, known_profiles, profile_device
from adjcomp.options import Options
from adjcomp.passes.cost import CostModel, device_rates
from adjcomp.passes.forks import side_by_side
from adjcomp.passes.forward_only import forward_plan
from adjcomp.passes.joinable import NotJoinable
from adjcomp.passes.pipeline import Captured
from adjcomp.passes.schedule import Search, solve_forms
from adjcomp.passes.simulate import simulate
from adjcomp.passes.split import KeepPolicy
from adjcomp.residents import layer_residency
from adjcomp.runtime.cuda_graphs import LIBRARY_BYTES, can_record
from adjcomp.units import parse_bytes

RECORDINGS_SHARE = 0.05  # of a budget that recordings may take where nobody asked for them
CALIBRATE_FROM_SECONDS = 0.5  # shorter steps are planned by the analytic model: timing tiles would take longer than it could win


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is wanted for."""

    captured: Captured
    seq_len: int
    held: Held
    side_bytes: int
    budget_bytes: int
    candidates: Sequence[int]
    device: str  # name of the device in the plan
    options: Options
    saved: Plan | None = None  # a plan to run instead of making one
    recording: RecordingPolicy | None = None  # `make_executable` chooses it by the options
    long_candidates: Sequence[int] = ()  # further chunk lengths, for ranges of time that are joined by summaries
    by_layer: bool = True  # whether gradients come and go layer by layer; with other ranks all are there from the Turn on


def make_executable(request: PlanRequest) -> Executable:
    """The plan of a request on the device that holds the model, with its programs.

    Tiles that keep everything their VJP reads make the fastest plan where all of it fits; else the lean form is planned as well,
    and the faster of the two plans is taken. The lower bound speaks of both.
    """
    recording = recording_policy(request.options, request.held)
    if request.saved is not None:
        return _saved_executable(request, request.saved, recording)
    if recording is None or not recording.only_worth:
        return _planned(replace(request, recording=recording))
    try:
        made = _planned(replace(request, recording=recording))
    except BudgetError:
        return _planned(request)
    fits = made.plan.costs.resident_bytes.get(RESIDENT_KIND, 0) <= RECORDINGS_SHARE * request.budget_bytes
    return made if fits else _planned(request)


def recording_policy(options: Options, held: Held) -> RecordingPolicy | None:
    """What is recorded where the options leave it open, or ask for it; None on a device that can't, or where it isn't wanted."""
    device = next(iter(held.parameters.values())).device
    if options.cuda_graphs is False or options.streams > 1 or not can_record(device):
        return None
    return RecordingPolicy(options.cuda_graphs is None, LIBRARY_BYTES if device.type == "cuda" else 0)


def _planned(request: PlanRequest) -> Executable:
    """The faster of the plans with full and with lean tiles."""
    device, models = own_device(request.held), []

    def forms() -> Iterator[CostModel]:
        for policy in (KeepPolicy.FULL, KeepPolicy.LEAN):
            models.append(_cost_model(request, policy, device))
            yield models[-1]

    host = host_tier(request.options, device)
    search = Search(request.seq_len, request.budget_bytes, request.candidates, request.device, request.options, host)
    chosen, plan = solve_forms(forms(), search)
    model, plan = models[chosen], side_by_side(plan, request.options.streams)
    programs = model.programs(plan.chunk), model.programs(model.last_length(plan.chunk))
    return Executable(request.captured.stack, plan, *programs, model.recorded(plan.chunk))


def make_evaluation(request: PlanRequest) -> Executable:
    """What runs a call without gradients: no tile is run twice, and nothing is kept."""
    none = (None,) * len(request.captured.stack.templates)
    outside = outside_costs(request.captured.stack, none, request.held, request.side_bytes, request.seq_len)
    rates = device_rates(own_device(request.held))
    model = CostModel(request.captured.stack, none, request.seq_len, outside, rates, KeepPolicy.FULL)
    plan = forward_plan(model, request.candidates, request.budget_bytes, request.device)
    return Executable(request.captured.stack, plan, model.programs(plan.chunk), model.programs(model.last_length(plan.chunk)))


def _saved_executable(request: PlanRequest, plan: Plan, recording: RecordingPolicy | None) -> Executable:
    """A saved plan on this model, after checking that it is a plan for it: same length, same tiles, same bytes."""
    if plan.costs.seq_len != request.seq_len:
        raise ValueError(f"the saved plan is for {plan.costs.seq_len} tokens and the call has {request.seq_len}: plan again")
    _check_variant(plan, request.captured.stack.variant)
    plan = plan if request.by_layer or not plan.costs.gradients else _with_all_gradients(plan)
    policy = KeepPolicy(plan.costs.keeps)
    splits = request.captured.splits(policy)
    outside = outside_costs(request.captured.stack, splits, request.held, request.side_bytes, request.seq_len)
    rates = device_rates(own_device(request.held))
    joins = request.captured.joins(splits) if plan.costs.joins else ()
    joins = () if isinstance(joins, NotJoinable) else joins
    model = CostModel(request.captured.stack, splits, request.seq_len, outside, rates, policy, recording=recording, joins=joins)
    expected = model(plan.chunk)
    if tuple(map(_bytes_of, expected.joins)) != tuple(map(_bytes_of, plan.costs.joins)):
        raise ValueError("the saved plan doesn't fit the model: what joins ranges of time differs")
    for table, saved_table in ((expected.layers, plan.costs.layers), (expected.last_layers, plan.costs.last_layers)):
        if len(table) != len(saved_table):
            raise ValueError(f"the saved plan has {len(saved_table)} layers with stem and head, the model {len(table)}")
        for tile, saved_tile in zip(table, saved_table, strict=True):
            if _bytes_of(tile) != _bytes_of(saved_tile):
                raise ValueError(
                    f"the saved plan doesn't fit the model: tiles of {tile.name} differ in bytes or in what they read"
                )
    programs = model.programs(plan.chunk), model.programs(model.last_length(plan.chunk))
    counted = plan.costs.resident_bytes.get(RESIDENT_KIND, 0)
    recorded = model.recorded(plan.chunk)
    recorded = recorded if recorded is not None and recorded.total_bytes <= counted else None
    return Executable(request.captured.stack, plan, *programs, recorded, model.join_programs(plan.chunk))


def _with_all_gradients(plan: Plan) -> Plan:
    """A saved plan for one device where all gradients are there from the Turn on. ValueError where that is too much for it."""
    costs = replace(plan.costs, gradients=())
    totals = simulate(costs, plan.shares, plan.actions)
    certificate = replace(plan.certificate, peak_bytes=totals.peak_bytes, bytes_by_kind=totals.bytes_by_kind)
    over = [share.name for share in plan.shares if totals.peak_bytes[share.name] > share.budget_bytes]
    if over:
        raise ValueError("the saved plan counts on gradients that come layer by layer; under a mesh all are there at once")
    return replace(plan, costs=costs, certificate=certificate)


def _check_variant(plan: Plan, variant: Variant) -> None:
    """ValueError for a saved plan of another gradient than the one that is asked for."""
    saved = Variant(Coupling(plan.costs.coupling), plan.costs.adjoint_window)
    if saved != variant:
        raise ValueError(f"the saved plan computes another gradient ({saved}) than asked for ({variant}): plan again")


def _bytes_of(tile: TileCost | JoinCost) -> tuple[object, ...]:
    """All of a tile's costs, or of joining its layer's ranges, but times and names."""
    return tuple(getattr(tile, f.name) for f in fields(tile) if not f.name.endswith("_seconds") and f.name != "name")


@dataclass(frozen=True)
class OfflineRequest:
    """What a plan is wanted for, on a machine that need not be here. budget_bytes: on every device. long_candidates: further
    chunk lengths, for ranges of time that are joined by summaries.
    """

    captured: Captured
    seq_len: int
    held: Held
    side_bytes: int
    budget_bytes: int
    candidates: Sequence[int]
    machine: Machine
    options: Options
    optimizer: Mapping[str, int]  # bytes of optimizer state by parameter
    long_candidates: Sequence[int] = ()


def plan_on_machine(request: OfflineRequest) -> Plan:
    """The plan of a request; tiles keep their lean form or everything that their VJP reads, whichever is faster."""
    models = {policy: _offline_model(request, policy) for policy in KeepPolicy}
    if len(request.machine.devices) > 1:
        return _plan_on_devices(request, models)
    device, options = request.machine.devices[0], request.options
    host = host_tier(options, device)
    search = Search(request.seq_len, request.budget_bytes, request.candidates, device.name, options, host)
    _, plan = solve_forms((models[policy] for policy in (KeepPolicy.FULL, KeepPolicy.LEAN)), search)
    return side_by_side(plan, options.streams)


def check_single(options: Options, several: str) -> None:
    """ValueError for options that only plans for one device know, where there are `several`."""
    for name, value in (("host_budget", options.host_budget), ("border_dtype", options.border_dtype)):
        if value is not None:
            raise ValueError(f"{name}={value!r} is for plans for one device, and {several}")


def host_tier(options: Options, device: Device) -> HostTier | None:
    """Where borders of a plan on `device` may be spilled to; None where the options allow it nowhere.

    Raises:
        ValueError: the device is a CPU.
    """
    if options.host_budget is None:
        return None
    if device.kind == "cpu":
        raise ValueError(
            f"host_budget={options.host_budget!r} spills borders from an accelerator to its host, and {device.name} computes in "
            "the host's own memory: raise mem_budget instead"
        )
    link = Link(device.host_bandwidth)
    return HostTier(parse_bytes(options.host_budget), link.bandwidth, link.latency)


def _offline_model(request: OfflineRequest, policy: KeepPolicy) -> CostModel:
    """The costs of tiles that keep what `policy` says, on the machine's first device."""
    splits = request.captured.splits(policy)
    outside = outside_costs(request.captured.stack, splits, request.held, request.side_bytes, request.seq_len)
    rates, recording = device_rates(request.machine.devices[0]), _offline_recording(request)
    joins = joins_of(request.captured, splits, request.options, len(request.machine.devices))
    return CostModel(request.captured.stack, splits, request.seq_len, outside, rates, policy, recording=recording, joins=joins)


def _offline_recording(request: OfflineRequest) -> RecordingPolicy | None:
    """Recordings that are asked for on one accelerator; what `compile` records of its own accord takes what a plan can spare."""
    options, devices = request.options, request.machine.devices
    if options.cuda_graphs is not True or options.streams > 1 or len(devices) > 1 or devices[0].kind == "cpu":
        return None
    return RecordingPolicy(False, LIBRARY_BYTES)


def _plan_on_devices(request: OfflineRequest, models: Mapping[KeepPolicy, CostModel]) -> Plan:
    """The plan of a request on several devices."""
    check_single(request.options, f"{request.machine.name} has several")
    from adjcomp.passes.place import solve_machine

    stack, held, optimizer = request.captured.stack, request.held, request.optimizer
    forms = [
        (model, layer_residency(stack, model.splits, held, optimizer, request.side_bytes, request.seq_len))
        for model in models.values()
    ]
    return solve_machine(
        forms,
        machine=request.machine,
        seq_len=request.seq_len,
        budget_bytes=request.budget_bytes,
        candidates=request.candidates,
        options=request.options,
        long_candidates=request.long_candidates,
    )


def own_device(held: Held) -> Device:
    """The device that holds the model, described: on an accelerator the nearest known profile serves, found by its name."""
    device = next(iter(held.parameters.values())).device
    if device.type != "cuda":
        return profile_device("cpu", name="cpu")
    name = torch.cuda.get_device_name(device).lower()
    memory = torch.cuda.get_device_properties(device).total_memory
    known = [p for p in known_profiles() if p != "cpu" and p.split("-")[0] in name]
    fitting = [p for p in known if profile_device(p, name=p).memory_bytes <= memory * 1.02]
    profile = (fitting or known or ["a100-80gb"])[-1]
    return replace(profile_device(profile, name=str(device)), memory_bytes=memory)


def _cost_model(request: PlanRequest, policy: KeepPolicy, device: Device) -> CostModel:
    splits = request.captured.splits(policy)
    outside = outside_costs(request.captured.stack, splits, request.held, request.side_bytes, request.seq_len)
    outside = outside if request.by_layer else replace(outside, gradients=())
    rates = device_rates(device)
    model = CostModel(request.captured.stack, splits, request.seq_len, outside, rates, policy, recording=request.recording)
    return calibrated(model, request.held, request.options)


def calibrated(model: CostModel, held: Held, options: Options) -> CostModel:
    """The model with measured times, where a step is long enough to be worth measuring and the options allow it."""
    if options.deterministic or _analytic_seconds(model) < CALIBRATE_FROM_SECONDS:
        return model
    return replace(model, times=measured_times(model, {**held.parameters, **held.buffers}))


def _analytic_seconds(model: CostModel) -> float:
    """Seconds of a step without recomputation."""
    chunk = min(1024, model.seq_len)
    costs = model(chunk)
    return sum(tile.keep_seconds + tile.adjoint_seconds for tile in costs.layers) * costs.chunk_count
