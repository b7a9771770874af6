"""Kernels against the floor that memory or arithmetic sets, against other libraries where they are installed, and in graphs.

A floor divides the bytes that must move by the rate of a large copy, or the FLOPs by that of a large product, both measured here.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from rows import Job, Row, peak_bytes, timed, wait
from torch import Tensor

from adjcomp import ops
from adjcomp.ops import reference

Run = Callable[[], object]


LOOP_SHARE = 16  # eager torch loops over time: over so small a part of it, which the seconds are multiplied with


@dataclass(frozen=True)
class Workload:
    """An op on one shape. bytes, flops: least of forward and VJP together, from the shapes. other: what it is compared with."""

    name: str
    forward: Callable[..., Tensor]
    inputs: list[Tensor]
    flops: float
    other: str
    other_forward: Callable[..., Tensor]
    other_share: int = 1  # the other one gets the first 1 / other_share of time

    @property
    def bytes(self) -> float:
        """Inputs read twice and their cotangents written once; the output written once and its cotangent read once."""
        size = sum(t.numel() * t.element_size() for t in self.inputs)
        return 3 * size + 2 * self.inputs[0].numel() * self.inputs[0].element_size()

    def step(self) -> Run:
        """Forward and VJP."""
        return _both_ways(self.forward, self.inputs)

    def other_seconds(self, device: torch.device) -> float:
        """What the other one takes for the same."""
        share = self.other_share
        inputs = self.inputs if share == 1 else [t[:, : max(1, t.shape[1] // share)] for t in self.inputs]
        return share * timed(_both_ways(self.other_forward, inputs), device, rounds=9 if share == 1 else 3)


def _both_ways(forward: Callable[..., Tensor], inputs: list[Tensor]) -> Run:
    leaves = [t.detach().requires_grad_() for t in inputs]
    seed = torch.randn_like(forward(*inputs))
    return lambda: torch.autograd.grad(forward(*leaves), leaves, seed)


def _other(package: str, theirs: Callable[..., Tensor], loop: Callable[..., Tensor]) -> tuple[str, Callable[..., Tensor], int]:
    """Another library's kernels where they are installed, else eager torch: a loop over time in float32."""
    if importlib.util.find_spec(package) is not None:
        return package, theirs, 1

    def eager(*inputs: Tensor) -> Tensor:
        return loop(*(t.float() for t in inputs)).to(inputs[0].dtype)

    return f"eager torch (a loop over T / {LOOP_SHARE})", eager, LOOP_SHARE


def _draw(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, device=device).to(dtype) for shape in shapes]


def _selective(device: torch.device, dtype: torch.dtype, t: int, d: int, n: int) -> Workload:
    x, dt, B, C, z = _draw(device, dtype, (1, t, d), (1, t, d), (1, t, n), (1, t, n), (1, t, d))
    A, D, bias = -torch.rand(d, n, device=device) * 8, torch.randn(d, device=device), torch.full((d,), -4.0, device=device)

    def forward(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        return ops.selective_scan(x, dt, A, B, C, D, z, dt_bias=bias, dt_softplus=True)[0]

    def theirs(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        first = [u.mT for u in (x, dt, B, C, z)]
        return selective_scan_fn(first[0], first[1], A, *first[2:4], D, first[4], bias, True).mT

    def loop(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        return reference.selective_scan(x, dt, A, B, C, D, z, dt_bias=bias, dt_softplus=True)[0]

    other = _other("mamba_ssm", theirs, loop)
    return Workload(f"selective_scan T={t} D={d} N={n}", forward, [x, dt, B, C, z], 0.0, *other)


def _ssd(device: torch.device, dtype: torch.dtype, t: int, h: int, p: int, n: int) -> Workload:
    x, dt, B, C, z = _draw(device, dtype, (1, t, h, p), (1, t, h), (1, t, 1, n), (1, t, 1, n), (1, t, h, p))
    A, D, bias = -torch.rand(h, device=device) * 8, torch.randn(h, device=device), torch.full((h,), -4.0, device=device)

    def forward(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        return ops.ssd(x, dt, A, B, C, D, z, dt_bias=bias, dt_softplus=True)[0]

    def theirs(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, dt_bias=bias, dt_softplus=True)

    def loop(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        return reference.ssd(x, dt, A, B, C, D, z, dt_bias=bias, dt_softplus=True)[0]

    chunk = 64
    flops = 3 * 2.0 * t * h * (chunk * (n + p) + 2 * p * n)  # the VJP costs twice the forward
    other = _other("mamba_ssm", theirs, loop)
    return Workload(f"ssd T={t} H={h} P={p} N={n}", forward, [x, dt, B, C, z], flops, *other)


def _delta(device: torch.device, dtype: torch.dtype, t: int, h: int, k: int) -> Workload:
    q, key, v, beta = _draw(device, dtype, (1, t, h, k), (1, t, h, k), (1, t, h, k), (1, t, h))
    q, key = (torch.nn.functional.normalize(u.float(), dim=-1).to(dtype) for u in (q, key))
    g = -torch.rand(1, t, h, device=device) * 0.1

    def forward(q: Tensor, key: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return ops.gated_delta_rule(q, key, v, g, beta)[0]

    def theirs(q: Tensor, key: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, key, v, g, beta, scale=1.0)[0]

    def loop(q: Tensor, key: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return reference.gated_delta_rule(q, key, v, g[:, : v.shape[1]], beta)[0]

    other = _other("fla", theirs, loop)
    flops = 3 * 2.0 * t * h * (2 * 64 * 2 * k + 4 * k * k)
    return Workload(f"gated_delta_rule T={t} H={h} K={k}", forward, [q, key, v, beta.sigmoid()], flops, *other)


def _scan(device: torch.device, dtype: torch.dtype, t: int, d: int) -> Workload:
    a, b = torch.rand(1, t, d, device=device).to(dtype), *_draw(device, dtype, (1, t, d))

    def loop(a: Tensor, b: Tensor) -> Tensor:
        return reference.linear_scan(a, b)[0]

    other = (f"eager torch (a loop over T / {LOOP_SHARE})", loop, LOOP_SHARE)
    return Workload(f"linear_scan T={t} D={d}", lambda a, b: ops.linear_scan(a, b)[0], [a, b], 0.0, *other)


def _conv(device: torch.device, dtype: torch.dtype, t: int, d: int) -> Workload:
    (x,), weight, bias = _draw(device, dtype, (1, t, d)), torch.randn(d, 4, device=device), torch.randn(d, device=device)

    def eager(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.mT, (3, 0))
        out = torch.nn.functional.conv1d(padded, weight.to(dtype)[:, None], bias.to(dtype), groups=d)
        return torch.nn.functional.silu(out).mT

    def forward(x: Tensor) -> Tensor:
        return ops.causal_conv1d(x, weight, bias, activation="silu")[0]

    return Workload(f"causal_conv1d T={t} D={d}", forward, [x], 0.0, "torch", eager)


def _norm(device: torch.device, dtype: torch.dtype, t: int, d: int) -> Workload:
    x, weight = _draw(device, dtype, (1, t, d), (d,))
    eager = partial(torch.nn.functional.rms_norm, normalized_shape=(d,), eps=1e-5)
    return Workload(
        f"rms_norm T={t} D={d}",
        lambda x, w: ops.rms_norm(x, w, 1e-5),
        [x, weight],
        0.0,
        "torch",
        lambda x, w: eager(x, weight=w),
    )


def _loss(device: torch.device, dtype: torch.dtype, t: int, d: int, v: int) -> Workload:
    x, weight = _draw(device, dtype, (1, t, d), (v, d))
    labels = torch.randint(0, v, (1, t), device=device)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((x @ weight.T).float().flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, weight, labels)[0]

    return Workload(f"linear_cross_entropy T={t} D={d} V={v}", forward, [x, weight], 4 * 2.0 * t * d * v, "torch", eager)


def workloads(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, Callable[[], Workload]]:
    """By label; made when they are measured, so that only one is in memory."""
    t, d, v = (64, 32, 50) if tiny else (8192, 4096, 50280)
    makers: dict[str, Callable[..., Workload]] = {
        "selective_scan": partial(_selective, t=t, d=d, n=4 if tiny else 16),
        "ssd": partial(_ssd, t=t, h=d // 16 if tiny else d // 64, p=16 if tiny else 64, n=16 if tiny else 128),
        "gated_delta_rule": partial(_delta, t=t, h=2 if tiny else 16, k=16 if tiny else 128),
        "linear_scan": partial(_scan, t=t, d=d),
        "causal_conv1d": partial(_conv, t=t, d=d),
        "rms_norm": partial(_norm, t=t, d=d // 2),
        "linear_cross_entropy": partial(_loss, t=t // 2, d=d // 2, v=v),
    }
    return {name: partial(make, device, dtype) for name, make in makers.items()}


@cache
def rates(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Bytes per second of a copy (read and written counted), FLOP per second of a bfloat16 product."""
    size, n = (1 << 16, 64) if tiny else (1 << 28, 8192)
    source = torch.empty(size, device=device)
    target = torch.empty_like(source)
    copied = 8 * size / timed(lambda: target.copy_(source), device)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    return copied, 2 * n**3 / timed(lambda: a @ a, device)


def jobs(device: torch.device, tiny: bool) -> Iterator[Job]:
    for name, make in workloads(device, torch.float32 if tiny else torch.bfloat16, tiny).items():
        yield Job("speed", name, partial(_measure, make, device, tiny))


def _measure(make: Callable[[], Workload], device: torch.device, tiny: bool) -> Row:
    work = make()
    step = work.step()
    seconds, (copied, multiplied) = timed(step, device), rates(device, tiny)
    floor = max(work.bytes / copied, work.flops / multiplied)
    other, note = None, f"{seconds / floor:.2f} x floor"
    try:
        other = work.other_seconds(device)
        note += f", {other / seconds:.2f} x faster than {work.other}"
    except Exception as error:  # noqa: BLE001 - another library's failure says nothing about this kernel
        note += f"; {work.other} failed: {type(error).__name__}"
    return Row("speed", work.name, True, seconds, floor, other, peak_bytes(step, device), note=note)


def first_calls(device: torch.device, tiny: bool) -> Iterator[Job]:
    """Everything that is timed later, called once: what its kernels take to compile, in processes side by side."""
    for name, make in {**workloads(device, torch.float32 if tiny else torch.bfloat16, tiny), **in_graphs(device)}.items():
        yield Job("first calls", name, partial(_first, name, make, device))


def _first(name: str, make: Callable[[], Workload], device: torch.device) -> Row:
    step, start = make().step(), time.perf_counter()
    step()
    wait(device)
    return Row("first calls", name, True, time.perf_counter() - start)


def in_graphs(device: torch.device) -> dict[str, Callable[[], Workload]]:
    """What is captured as CUDA graphs."""
    if device.type != "cuda":
        return {}
    return {
        "selective_scan T=1024": partial(_selective, device, torch.bfloat16, t=1024, d=1536, n=16),
        "ssd T=1024": partial(_ssd, device, torch.bfloat16, t=1024, h=24, p=64, n=128),
    }


def graph_jobs(device: torch.device, tiny: bool) -> Iterator[Job]:
    """The launches of one step replayed as a CUDA graph, against launching them one by one."""
    for name, make in in_graphs(device).items():
        yield Job("graphs", name, partial(_graph, make, device))


def _graph(make: Callable[[], Workload], device: torch.device) -> Row:
    work = make()
    step = work.step()
    launched = timed(step, device)
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replayed = timed(graph.replay, device)
    return Row("graphs", work.name, True, replayed, None, launched, note=f"launches one by one take {launched / replayed:.2f} x")
