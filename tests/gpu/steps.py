"""Training steps of Mamba models through `adjcomp.compile`: seconds and peak, from 8K to 1M tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rows import Job, Row, timed, wait

import adjcomp


@dataclass(frozen=True)
class Model:
    name: str
    width: int
    layers: int
    vocabulary: int = 50280


MODELS = (Model("mamba-130m", 768, 24), Model("mamba-370m", 1024, 48), Model("mamba-1.4b", 2048, 48))
LENGTHS = (8192, 65536, 1 << 18, 1 << 20)
SMALL = (Model("mamba-tiny", 32, 2, 61),)
RUN_TWICE = 1 << 16  # up to this length
BUDGET_SHARE = 0.8  # of what the device has free


def jobs(device: torch.device, tiny: bool) -> Iterator[Job]:
    """Two rounds over all models, the shorter sequences first: a run cut short has seen every model. Within a round the lengths
    of a model follow each other, so that it is traced once.
    """
    for round_ in ((64, 96),) if tiny else (LENGTHS[:2], LENGTHS[2:]):
        for model in SMALL if tiny else MODELS:
            for length in round_:
                name = f"{model.name} T={length}"
                yield Job("steps", name, partial(_step, name, model, length, device))
    model, length = (SMALL[0], 64) if tiny else (MODELS[0], LENGTHS[0])
    for streams in (1, 4):
        name = f"{model.name} T={length}, residual coupling, {streams} stream{'s' if streams > 1 else ''}"
        yield Job("steps", name, partial(_step, name, model, length, device, streams))


def first_calls(device: torch.device, tiny: bool) -> Iterator[Job]:
    """A step of the smallest model, whose kernels those of the others need as well."""
    model, length = (SMALL[0], 64) if tiny else (MODELS[0], LENGTHS[0])
    yield Job("first calls", f"{model.name} T={length}", partial(_first, model, length, device))


def _first(model: Model, length: int, device: torch.device) -> Row:
    start = time.perf_counter()
    row = _step("", model, length, device)
    return replace(row, section="first calls", name=f"{model.name} T={length}", seconds=time.perf_counter() - start)


def graph_jobs(device: torch.device, tiny: bool) -> Iterator[Job]:
    """Whole steps with tiles replayed as CUDA graphs, against every kernel launched by itself."""
    for model in SMALL if tiny else MODELS[:2]:
        name = f"{model.name} T={64 if tiny else LENGTHS[0]}, a step"
        yield Job("graphs", name, partial(_graphs, name, model, 64 if tiny else LENGTHS[0], 16 if tiny else 1024, device))


def _graphs(name: str, model: Model, length: int, chunk: int, device: torch.device) -> Row:
    ids = torch.randint(0, model.vocabulary, (1, length), device=device)
    seconds, grads, replayed, peak = [], [], 0, 0
    for wanted in (True, False):
        torch.manual_seed(0)
        module = _build(model, device)
        compiled = adjcomp.compile(module, mem_budget=_budget(device), chunk=chunk, options=adjcomp.Options(cuda_graphs=wanted))

        def step(module: torch.nn.Module = module, compiled: torch.nn.Module = compiled) -> None:
            module.zero_grad(set_to_none=True)
            compiled(input_ids=ids, labels=ids).loss.backward()

        seconds.append(timed(step, device, rounds=5))
        grads.append(torch.cat([p.grad.flatten().double() for p in module.parameters()]))
        if wanted:
            replayed, peak = compiled.stats.replayed_tiles, compiled.stats.measured_peak_bytes
    error = float((grads[0] - grads[1]).norm() / grads[1].norm())
    note = f"{replayed} replays a step; launches one by one take {seconds[1] / seconds[0]:.2f} x"
    inside = error <= 1e-3 and (replayed > 0 or device.type != "cuda")
    return Row("graphs", name, inside, seconds[0], None, seconds[1], peak, error, note)


def _build(model: Model, device: torch.device) -> torch.nn.Module:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=model.vocabulary, hidden_size=model.width, num_hidden_layers=model.layers, state_size=16, use_cache=False
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return transformers.MambaForCausalLM(config).to(dtype).train()


def _budget(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(device)
    return int(BUDGET_SHARE * free)


@functools.lru_cache(maxsize=1)
def _compiled(model: Model, device: torch.device, streams: int | None) -> Any:
    """With exact gradients or, where streams are given, in the residual form on so many."""
    module = _build(model, device)
    if streams is None:
        return adjcomp.compile(module, mem_budget=_budget(device))
    return adjcomp.compile(module, mem_budget=_budget(device), coupling="residual", options=adjcomp.Options(streams=streams))


def _step(name: str, model: Model, length: int, device: torch.device, streams: int | None = None) -> Row:
    """A step; a short one is run twice, as the first may still compile."""
    compiled = _compiled(model, device, streams)
    begun = time.perf_counter()
    compiled.warmup([(1, length)])
    planning = time.perf_counter() - begun
    ids = torch.randint(0, model.vocabulary, (1, length), device=device)
    start = time.perf_counter()
    for _ in range(2 if length <= RUN_TWICE else 1):
        wait(device)
        start = time.perf_counter()
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        wait(device)
        compiled.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start
    stats = compiled.stats
    note = f"{length / seconds:,.0f} tokens/s, chunk {compiled.plan.chunk}, planned in {planning:.1f} s; predicted"
    note += f" {compiled.plan.seconds:.3f} s, {stats.predicted_peak_bytes / 2**20:.0f} MiB"
    inside = stats.measured_peak_bytes <= stats.budget_bytes and bool(loss.isfinite())
    return Row("steps", name, ok=inside, seconds=seconds, peak_bytes=stats.measured_peak_bytes, note=note)
