"""`adjcomp.compile` and its companions: the one place where all parts meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from adjcomp.budget import check_budget
from adjcomp.compiled import make_view
from adjcomp.gradients import GradientReport, compare, loss_of, measure
from adjcomp.ir.narrow import rounds_borders
from adjcomp.ir.plan import Plan
from adjcomp.mesh.sharding import refuse_sharded
from adjcomp.mesh.spread import join
from adjcomp.optimizers import optimizer_bytes
from adjcomp.options import Options
from adjcomp.planning import check_single
from adjcomp.session import Session
from adjcomp.variants import check_streams, make_variant, warn_once, warn_rounded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: torch.nn.Module,
    mem_budget: int | str | None = None,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    mesh: DeviceMesh | None = None,
    chunk: int | None = None,
    adjoint_window: int | None = None,
    coupling: str = "exact",
    plan: Plan | None = None,
    options: Options | None = None,
) -> torch.nn.Module:
    """A view of `model` that trains like it (same outputs, same gradients) and never holds more than the budget.

    Args:
        model: any module whose activations form a residual stack over a sequence; it is not changed.
        mem_budget: bytes as an int, a string ("16GiB", "800MB"), or None for what the device has free. It bounds everything live
            on the
            device during a step: parameters, gradients, buffers, inputs, activations, workspace, optimizer state.
        optimizer: counted in the budget with the state it holds from its second step on: the optimizer itself, or a name such as
            "adamw".
        mesh: the ranks to spread over, which all call this: a DeviceMesh whose dimensions are named "layers", "time" or "auto"
            (the planner decides), and "data" for replicas whose gradients are averaged. None: this process's own device only.
            The budget is that of each rank.
        chunk: chunk length in tokens; None lets the planner choose.
        adjoint_window: an approximation of the gradient: through a recurrence, the output at step t reaches steps
            t - adjoint_window + 1 … t only. None: all, exactly.
        coupling: "exact", or "residual", an approximation of the gradient: each layer reads its input as a constant, so that
            layers don't wait for each other in the backward.
        plan: a saved plan to run, for calls of its length; its budget stands in for `mem_budget`.
        options: see `adjcomp.Options`.

    Raises:
        ValueError, TypeError: a budget of another form or above the device's size, a chunk below 1, another coupling, a
            window below 1 or one that is no integer, several streams for exact gradients.
        RankError: with a mesh, here and at any later call, when another rank fails or disagrees.
        CaptureError, BudgetError: at the first call, when the model cannot be captured or no plan fits.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(chunk, bool) or not isinstance(chunk, int | type(None)) or (chunk is not None and chunk < 1):
        raise ValueError(f"chunk must be a positive number of tokens or None, not {chunk!r}")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    check_budget(mem_budget, device)
    optimizer_bytes(optimizer, model.parameters())  # an unknown name is refused now rather than at the first step
    variant = make_variant(coupling, adjoint_window)
    warn_once(variant)
    chosen = options or Options()
    check_streams(chosen, variant)
    if chosen.host_budget is not None and device.type == "cpu":
        raise ValueError("Options(host_budget=…) spills borders from an accelerator to its host, and this model is on the host")
    if mesh is None:
        refuse_sharded(model)
    else:
        check_single(chosen, "a mesh has several")
    if chosen.border_dtype is not None or (plan is not None and rounds_borders(plan.actions)):
        warn_rounded()
    spread = None if mesh is None else join(mesh, chosen, device, model)
    return make_view(Session(model, mem_budget, chunk, chosen, optimizer, plan, variant, spread))


def check_gradients(
    model: torch.nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    mem_budget: int | str | None = None,
    *,
    chunk: int | None = None,
    adjoint_window: int | None = None,
    coupling: str = "exact",
) -> GradientReport:
    """Run one step of `model` plainly and one compiled, and compare loss and gradients; gradients the model holds are left as
    they were. With `adjoint_window` or `coupling="residual"` the report shows how far that approximation is from backpropagation.

    inputs: positional (tuple) or keyword (dict) arguments of one call. Random numbers (dropout) can't agree: use eval mode.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
    compiled = compile(model, mem_budget, chunk=chunk, adjoint_window=adjoint_window, coupling=coupling)
    plain = measure(model, lambda: loss_of(model(*args, **kwargs)))
    ours = measure(model, lambda: loss_of(compiled(*args, **kwargs)))
    return compare(plain, ours)
