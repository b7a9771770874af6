"""What each command of `adjcomp` does: from parsed arguments to the text to print and the exit code.

Imports are inside of the functions: listing machines or printing a saved plan needs no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjcomp.ir.plan import Plan
    from adjcomp.model_shapes import FoundModel, Inputs

Answer = tuple[str, int]


def plan_command(arguments: argparse.Namespace) -> Answer:
    """Plan a step, print the plan, write the files that are asked for."""
    from adjcomp.offline import plan
    from adjcomp.options import Options

    for path in (arguments.html, arguments.json, arguments.perfetto):
        _check_folder(path)
    found = _find(arguments)
    made = plan(
        found.model,
        arguments.budget,
        batch_size=arguments.batch_size,
        seq_len=arguments.seq_len,
        machine=arguments.machine,
        optimizer=arguments.optimizer,
        chunk=arguments.chunk,
        example_inputs=_inputs(found, arguments),
        adjoint_window=arguments.adjoint_window,
        coupling=arguments.coupling,
        options=Options(host_budget=arguments.host_budget),
    )
    if arguments.json:
        Path(arguments.json).write_text(made.to_json(), encoding="utf-8")
    _write(made, arguments)
    return str(made), 0


def frontier_command(arguments: argparse.Namespace) -> Answer:
    """Plans from the smallest budget that works up to the device."""
    from adjcomp.offline import frontier
    from adjcomp.options import Options
    from adjcomp.units import format_bytes, format_seconds

    found = _find(arguments)
    plans = frontier(
        found.model,
        batch_size=arguments.batch_size,
        seq_len=arguments.seq_len,
        machine=arguments.machine,
        optimizer=arguments.optimizer,
        example_inputs=_inputs(found, arguments),
        adjoint_window=arguments.adjoint_window,
        coupling=arguments.coupling,
        options=Options(host_budget=arguments.host_budget),
        points=max(2, arguments.points),
    )
    lines = [f"{'peak':>11}  {'step':>12}  {'tokens/s':>10}  {'gap':>7}  {'chunk':>8}  {'of the fastest':>14}"]
    fastest = min(plan.seconds for plan in plans)
    for plan in plans:
        rate = arguments.batch_size * arguments.seq_len / plan.seconds
        lines.append(
            f"{format_bytes(max(plan.peak_bytes.values())):>11}  {format_seconds(plan.seconds):>12}  {rate:>10,.0f}  "
            f"{100 * plan.gap:>5.2f} %  {plan.chunk:>8}  {plan.seconds / fastest:>13.2f}x"
        )
    return "\n".join(lines), 0


def explain_command(arguments: argparse.Namespace) -> Answer:
    """What was found in a model."""
    from adjcomp.explanation import explain

    found = _find(arguments)
    return str(explain(found.model, _inputs(found, arguments), arguments.batch_size, arguments.seq_len)), 0


def check_command(arguments: argparse.Namespace) -> Answer:
    """Gradients against plain autograd's, with random weights and random tokens."""
    from adjcomp.api import check_gradients

    found = _find(arguments, device="cpu")
    inputs = _inputs(found, arguments) or _random_tokens(found, arguments)
    report = check_gradients(
        found.model,
        inputs,
        arguments.budget,
        chunk=min(arguments.chunk, arguments.seq_len),
        adjoint_window=arguments.adjoint_window,
        coupling=arguments.coupling,
    )
    passed = report.max_relative_error <= arguments.bound
    return f"{report}\n{'within' if passed else 'NOT within'} the bound of {arguments.bound:g}", 0 if passed else 1


def show_command(arguments: argparse.Namespace) -> Answer:
    """A saved plan, printed, after it was checked again."""
    _check_folder(arguments.html)
    _check_folder(arguments.perfetto)
    plan = _read(arguments.plan)
    plan.verify()
    _write(plan, arguments)
    return str(plan), 0


def diff_command(arguments: argparse.Namespace) -> Answer:
    """What differs between two saved plans."""
    from adjcomp.report.difference import SAME, plan_difference

    text = plan_difference(_read(arguments.first), _read(arguments.second))
    return text, 0 if text == SAME else 1


def machines_command(arguments: argparse.Namespace) -> Answer:
    """The machines that have a name."""
    from adjcomp.machine import known_profiles, parse_machine
    from adjcomp.units import format_bytes

    lines = [f"{'name':<12}{'memory':>11}{'TFLOP/s':>9}{'GB/s':>7}{'in a node':>11}{'to the host':>13}{'between nodes':>15}"]
    for name in known_profiles():
        machine = parse_machine(name)
        device = machine.devices[0]
        ways = (machine.node_links[0].bandwidth, device.host_bandwidth, machine.network.bandwidth)
        speeds = [f"{value / 1e9:.4g}" for value in ways]
        figures = f"{format_bytes(device.memory_bytes):>11}{device.peak_flops / 1e12:>9.4g}{device.memory_bandwidth / 1e9:>7.4g}"
        lines.append(f"{name:<12}{figures}{speeds[0]:>11}{speeds[1]:>13}{speeds[2]:>15}")
    lines += ["", "speeds in GB/s each way; cpu is this computer"]
    lines += ["a100-40gb:8 is one node of eight, h100-80gb:4x8 are four such nodes; or a YAML file"]
    return "\n".join(lines), 0


COMMANDS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "plan": plan_command,
    "frontier": frontier_command,
    "explain": explain_command,
    "check": check_command,
    "show": show_command,
    "diff": diff_command,
    "machines": machines_command,
}


def _find(arguments: argparse.Namespace, device: str = "meta") -> FoundModel:
    """The model of the arguments."""
    from adjcomp.machine import parse_machine
    from adjcomp.model_shapes import find_model
    from adjcomp.progress import progress

    machine = parse_machine(arguments.machine) if "machine" in arguments else None  # a wrong name is refused at once
    on_cpu = device == "cpu" or (machine is not None and machine.devices[0].kind == "cpu")
    dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    with progress(f"building {arguments.model}"):
        return find_model(arguments.model, device=device, dtype=dtype, layers=arguments.layers)


def _inputs(found: FoundModel, arguments: argparse.Namespace) -> Inputs | None:
    return None if found.make_inputs is None else found.make_inputs(arguments.batch_size, arguments.seq_len)


def _random_tokens(found: FoundModel, arguments: argparse.Namespace) -> dict[str, Any] | tuple[Any, ...]:
    """Arguments of a call on random token ids.

    Raises:
        ValueError: the model has no embedding, so it is not called with token ids.
    """
    import torch

    from adjcomp.compiled import example_call

    embedding = next((m for m in found.model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if embedding is None:
        raise ValueError(
            "the model has no nn.Embedding: let the function return a pair, the model and a function that makes its inputs"
        )
    args, kwargs = example_call(found.model, arguments.batch_size, arguments.seq_len, None)
    shape = (arguments.batch_size, arguments.seq_len)
    ids = torch.randint(embedding.num_embeddings, shape, generator=torch.Generator().manual_seed(0))
    return dict.fromkeys(kwargs, ids) if kwargs else (ids,) * len(args)


def _read(path: str) -> Plan:
    from adjcomp.ir.plan import Plan

    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write(plan: Plan, arguments: argparse.Namespace) -> None:
    if arguments.html:
        plan.to_html(arguments.html)
    if arguments.perfetto:
        plan.to_perfetto(arguments.perfetto)


def _check_folder(path: str | None) -> None:
    """Say that a file can't be written before the plan is made, not after."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder")
