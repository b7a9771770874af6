"""A plan for a longer sequence serves a shorter one, where planning again would gain little.

The shorter sequence runs the same chunks under the modes of the longer one's last chunks: these hold the most, and what the
missing chunks held is free. So it fits; only a plan that recomputes could do better with the room, and one of nearly the same
length hardly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from adjcomp.budget import outside_costs
from adjcomp.ir.actions import Advance, Forward, HeadVjp, Loss, Recompute
from adjcomp.ir.executable import Executable
from adjcomp.ir.modes import ColumnMode
from adjcomp.ir.narrow import Narrow
from adjcomp.ir.order import segments_of
from adjcomp.ir.plan import Plan
from adjcomp.ir.transfers import Offload
from adjcomp.passes.cost import CostModel, device_rates
from adjcomp.passes.emit import emit
from adjcomp.passes.forks import side_by_side
from adjcomp.passes.schedule.search import build_plan
from adjcomp.passes.split import KeepPolicy
from adjcomp.planning import PlanRequest, calibrated, own_device, recording_policy

NEAR = 0.75  # of the longer sequence: from there on its plan serves although it recomputes


def serves(plan: Plan, seq_len: int) -> bool:
    """Whether a plan's chunks and modes are good for a sequence that is shorter, or as long among other things that are live."""
    if seq_len > plan.costs.seq_len or any(isinstance(action, Advance | Offload | Narrow) for action in plan.actions):
        return False
    if len(segments_of(plan)) > 1:
        return False
    if not any(isinstance(action, Recompute) for action in plan.actions):
        return seq_len >= plan.chunk
    return NEAR * plan.costs.seq_len <= seq_len < plan.costs.seq_len


def shortened(request: PlanRequest, longer: Executable) -> Executable | None:
    """The executable of `request` with the chunk length and modes of `longer`; None where that doesn't fit its budget."""
    policy = KeepPolicy(longer.plan.costs.keeps)
    splits = request.captured.splits(policy)
    outside = outside_costs(request.captured.stack, splits, request.held, request.side_bytes, request.seq_len)
    rates, recording = device_rates(own_device(request.held)), recording_policy(request.options, request.held)
    known, recording = {longer.plan.chunk: longer.programs}, recording if longer.recorded is not None else None
    model = CostModel(request.captured.stack, splits, request.seq_len, outside, rates, policy, None, recording, known)
    times = calibrated(replace(model, seq_len=longer.plan.costs.seq_len), request.held, request.options).times
    model = replace(model, times=times)
    costs = model(longer.plan.chunk)
    modes = column_modes(longer.plan)[-costs.chunk_count :]
    plan = build_plan(costs, emit(costs, modes), request.budget_bytes, request.device)
    if max(plan.peak_bytes.values()) > request.budget_bytes:
        return None
    plan = side_by_side(plan, request.options.streams)
    programs = model.programs(plan.chunk), model.programs(model.last_length(plan.chunk))
    return Executable(request.captured.stack, plan, *programs, model.recorded(plan.chunk))


def column_modes(plan: Plan) -> list[ColumnMode]:
    """The modes that a time-major plan was made of: what it keeps in the forward, and which tiles it runs again twice."""
    held = [0] * plan.costs.chunk_count
    noted: set[int] = set()
    runs: Counter[tuple[int, int]] = Counter()
    for action in plan.actions:
        if isinstance(action, Forward | Loss) and action.keep:
            held[action.chunk] += 1
        elif isinstance(action, Recompute):
            runs[action.chunk, action.layer] += 1
        elif isinstance(action, HeadVjp) and held[action.chunk] and runs[action.chunk, 0]:  # its input came with the pass
            noted.add(action.chunk)
    again: list[set[int]] = [set() for _ in held]
    for (chunk, layer), times in runs.items():
        if times > 1:
            again[chunk].add(layer)
    return [
        ColumnMode(0 if chunk in noted else held[chunk], frozenset(again[chunk]), chunk in noted) for chunk in range(len(held))
    ]
