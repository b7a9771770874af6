"""Every op on the device against its float64 reference, which runs there as well: outputs, states and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import op_cases
import torch
from op_cases import Careful, Case, errors_beside_eager, relative_errors, worse_than_eager
from rows import Job, Row
from torch import Tensor

from adjcomp import ops

CASES: dict[str, Callable[[], Case]] = {
    "linear_scan": lambda: op_cases.linear_scan(300, 2, 70),
    "linear_scan complex": lambda: op_cases.linear_scan(300, 2, 35, complex_=True),
    "dense_scan": lambda: op_cases.dense_scan(100, 2, 24),
    "dense_scan complex": lambda: op_cases.dense_scan(100, 2, 16, complex_=True),
    "selective_scan N=16": lambda: op_cases.selective_scan(300, 2, 70, 16),
    "selective_scan N=64": lambda: op_cases.selective_scan(100, 1, 40, 64),
    "ssd 64x128": lambda: op_cases.ssd(200, 1, 2, 2, 64, 128),
    "ssd 16x16": lambda: op_cases.ssd(200, 2, 1, 3, 16, 16),
    "gated_delta_rule": lambda: op_cases.gated_delta_rule(150, 1, 2, 64, 64),
    "gated_delta_rule, decay per channel": lambda: op_cases.gated_delta_rule(150, 1, 2, 64, 64, wide_decay=True),
    "causal_conv1d": lambda: op_cases.causal_conv1d(300, 2, 70),
}
TINY = {name: CASES[name] for name in ("linear_scan", "causal_conv1d")}
HALF = torch.bfloat16


def jobs(device: torch.device, tiny: bool) -> Iterator[Job]:
    for name, make in (TINY if tiny else CASES).items():
        for dtype in (torch.float32, HALF):
            if dtype == torch.float32 or "complex" not in name:
                label = f"{name} {str(dtype).removeprefix('torch.')}"
                yield Job("correctness", label, partial(_compare, label, make, dtype, device))
    yield Job("correctness", "linear_cross_entropy", partial(_loss, device))
    yield Job("correctness", "rms_norm", partial(_norm, device))
    yield Job("correctness", "counter_uniform", partial(_uniform, device))


def _compare(label: str, make: Callable[[], Case], dtype: torch.dtype, device: torch.device) -> Row:
    def there(t: Tensor) -> Tensor:
        return t.to(device)

    # sums that cancel are measured against all gradients together
    worst = max(relative_errors(make(), dtype, there, floor=0.02).values())
    # float32 products are exact unless torch is told otherwise; bfloat16 ones round their factors
    allowed = 5e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    ok, note = worst <= allowed, f"of {allowed:.1e} allowed"
    if dtype != torch.float32:
        case = make()
        moved = replace(case, tensors={name: None if t is None else there(t) for name, t in case.tensors.items()})
        bad = worse_than_eager(errors_beside_eager(moved, dtype, Careful.THROUGHOUT))
        ok, note = ok and not bad, f"{note}; worse than 1.5 x eager: {', '.join(bad) or 'nothing'}"
    return Row("correctness", label, ok=ok, error=worst, note=note)


def _worst(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    return max(((p.double() - q).norm() / q.norm().clamp_min(1e-12)).item() for p, q in pairs)


def _loss(device: torch.device) -> Row:
    x, weight = torch.randn(2, 70, 64, device=device), torch.randn(700, 64, device=device) * 0.1
    labels = torch.randint(0, 700, (2, 70), device=device)
    labels[0, ::3] = -100
    low, high = ([t.detach().to(d).requires_grad_() for t in (x, weight)] for d in (torch.float32, torch.float64))
    got, _ = ops.linear_cross_entropy(low[0], low[1], labels)
    want = torch.nn.functional.cross_entropy((high[0] @ high[1].T).flatten(0, 1), labels.flatten(), reduction="sum")
    grads = zip(torch.autograd.grad(got, low), torch.autograd.grad(want, high), strict=True)
    worst = _worst(iter([(got, want), *grads]))
    return Row("correctness", "linear_cross_entropy", ok=worst <= 5e-6, error=worst)


def _norm(device: torch.device) -> Row:
    x, weight, seed = (torch.randn(*shape, device=device) for shape in ((2, 33, 1000), (1000,), (2, 33, 1000)))
    low, high = ([t.detach().to(d).requires_grad_() for t in (x, weight)] for d in (torch.float32, torch.float64))
    got, want = ops.rms_norm(low[0], low[1], 1e-5), torch.nn.functional.rms_norm(high[0], (1000,), high[1], 1e-5)
    grads = zip(torch.autograd.grad(got, low, seed), torch.autograd.grad(want, high, seed.double()), strict=True)
    worst = _worst(iter([(got, want), *grads]))
    return Row("correctness", "rms_norm", ok=worst <= 5e-6, error=worst)


def _uniform(device: torch.device) -> Row:
    """Bit for bit what a CPU draws."""
    drawn = [
        ops.counter_uniform(torch.tensor(7, device=d), 3, (2, 50, 70), 1, torch.tensor(11, device=d)).cpu()
        for d in (torch.device("cpu"), device)
    ]
    return Row("correctness", "counter_uniform", ok=bool(torch.equal(*drawn)))
