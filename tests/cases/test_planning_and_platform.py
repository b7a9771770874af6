"""Cases C01–D05: huge byte counts, time limits, determinism of plans, missing packages, small devices, full float32 precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fidelity import compare, distance, mamba, mamba2, measure, next_token, tightest, tokens
from synthetic import regular_stack

import adjcomp
from adjcomp.ir.actions import Recompute
from adjcomp.ir.costs import StackCosts, TileCost
from adjcomp.passes.schedule import solve

ROOT = Path(__file__).resolve().parents[2]


def huge_stack(layers: int = 64, chunks: int = 64, size: int = 2**33) -> StackCosts:
    """A regular stack whose every tile keeps `size` bytes."""
    costs = regular_stack(chunks * 64, 64, layers)

    def grown(tile: TileCost) -> TileCost:
        extra = size - tile.keep_bytes
        return replace(tile, keep_bytes=size, keep_workspace_bytes=tile.keep_workspace_bytes + extra)

    return replace(costs, layers=tuple(map(grown, costs.layers)), last_layers=tuple(map(grown, costs.last_layers)))


@pytest.mark.parametrize("budget", [2**34 + 2**33, 2**40, 2**60, 2**62])
def test_c01_byte_counts_of_any_size(budget: int) -> None:
    """Coefficients near 2^62 make a CP-SAT model invalid; that must never reach the user, and the exact peak stays in the
    budget.
    """
    costs = huge_stack()
    plan = solve(
        lambda _: costs, seq_len=costs.seq_len, budget_bytes=budget, candidates=[64], device="cpu", options=adjcomp.Options()
    )
    plan.verify()
    assert plan.peak_bytes["cpu"] <= budget
    everything = 66 * 64 * 2**33
    assert any(isinstance(action, Recompute) for action in plan.actions) == (budget < everything)


def test_c03_time_limits_leave_a_plan() -> None:
    """When the solver has no time the constructive plan is returned and says so; below the minimum it is still an
    infeasibility.
    """
    model = mamba(num_hidden_layers=2)
    call = next_token(tokens(2, 128))
    smallest = tightest(model, call)
    for limit in (1e-6, 0.05, None):
        options = adjcomp.Options(solver_time_limit_seconds=limit)
        compiled = adjcomp.compile(model, mem_budget=int(1.2 * smallest), options=options)
        compare(model, compiled, call)
        compiled.plan.verify()
        assert compiled.plan.status in ("optimal", "feasible", "heuristic")
        if limit == 1e-6:
            assert compiled.plan.status == "heuristic"
    with pytest.raises(adjcomp.BudgetError, match="minimum"):
        call(adjcomp.compile(model, mem_budget=smallest - 1, options=adjcomp.Options(solver_time_limit_seconds=1e-6)))


PLAN = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
import hashlib, adjcomp
from fidelity import mamba2
compiled = adjcomp.compile(mamba2(num_hidden_layers=2), mem_budget={{budget}})
print(hashlib.sha256(compiled.plan_for(batch_size=2, seq_len=96).to_json().encode()).hexdigest())
"""


def test_c04_equal_inputs_give_equal_plans() -> None:
    """No clock, hash order or parallel search decides: equal bytes within a process and between processes."""
    model = mamba2(num_hidden_layers=2)
    budget = int(1.3 * tightest(model, next_token(tokens(2, 96))))
    texts = {adjcomp.compile(model, mem_budget=budget).plan_for(batch_size=2, seq_len=96).to_json() for _ in range(3)}
    assert len(texts) == 1
    digests = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PLAN.format(budget=budget)], capture_output=True, text=True, env=environment, check=True
        )
        digests.add(done.stdout.split()[-1])
    assert len(digests) == 1


WITHOUT = """
import sys, importlib.abc, warnings
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {support!r})
import adjcomp
from fidelity import compare, mamba, next_token, tightest, tokens
model, call = mamba(num_hidden_layers=2), next_token(tokens(1, 33))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compare(model, adjcomp.compile(model, mem_budget=int(1.5 * tightest(model, call))), call)
print("warned" if any("OR-Tools" in str(w.message) for w in caught) else "silent")
"""


@pytest.mark.parametrize(("names", "expected"), [(("triton",), "silent"), (("ortools",), "warned")])
def test_d02_missing_packages(names: tuple[str, ...], expected: str) -> None:
    """Without Triton a CPU works as ever; without OR-Tools plans are constructive ones, with a warning."""
    code = WITHOUT.format(names=names, support=str(ROOT / "tests" / "support"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == expected
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(entry.startswith("triton") and "Linux" in entry for entry in required)


DRIVERLESS = f"""
import importlib, json, pkgutil, sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
import adjcomp
skipped = ("__main__",)
for found in pkgutil.walk_packages(adjcomp.__path__, "adjcomp."):
    if not found.name.endswith(skipped):
        importlib.import_module(found.name)
from fidelity import compare, mamba, next_token, tokens
model = mamba(num_hidden_layers=2)
compare(model, adjcomp.compile(model, chunk=8), next_token(tokens(1, 17)))
driver = sys.modules["triton"].runtime.driver if "triton" in sys.modules else None
active = driver is not None and driver.__dict__.get("_active") is not None
print(json.dumps(active))
"""


def test_d03_triton_without_a_driver() -> None:
    """Importing everything and training on a CPU asks no GPU driver for anything."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", DRIVERLESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) is False


@pytest.mark.parametrize(("head_dim", "states"), [(128, 128), (512, 256)])
def test_d04_wide_heads_and_states(head_dim: int, states: int) -> None:
    """Widths that exceed a small device's shared memory are ordinary sizes for a tile on a CPU."""
    model = mamba2(hidden_size=head_dim // 2, num_heads=1, head_dim=head_dim, state_size=states, num_hidden_layers=1)
    compare(model, adjcomp.compile(model, chunk=16), next_token(tokens(1, 40)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("states", [128, 256])
def test_d04_wide_heads_and_states_on_a_gpu(head_dim: int, states: int) -> None:
    sizes = {"hidden_size": head_dim, "num_heads": 2, "head_dim": head_dim, "state_size": states, "num_hidden_layers": 1}
    call = next_token(tokens(1, 300).cuda())
    exact_model = mamba2(**sizes).cuda()
    exact = measure(exact_model, lambda: call(exact_model))
    low = mamba2(**sizes).cuda().bfloat16()
    plain, ours = (measure(low, lambda run=run: call(run)) for run in (low, adjcomp.compile(low)))

    def error(found: dict[str, torch.Tensor | None]) -> float:
        return max(float((found[n].float() - g).norm() / g.norm()) for n, g in exact.grads.items())

    assert error(ours.grads) <= 1.5 * error(plain.grads) + 1e-3


def wide_mamba2() -> torch.nn.Module:
    return mamba2(hidden_size=256, head_dim=64, num_heads=8, state_size=64, chunk_size=64, num_hidden_layers=2)


def test_d05_float32_products_are_full_precision() -> None:
    """The CPU result, which a GPU must match to 2e-5: products of float32 are not rounded on the way."""
    model = wide_mamba2()
    compare(model, adjcomp.compile(model, chunk=64), next_token(tokens(1, 96)))


@pytest.mark.gpu
def test_d05_float32_products_are_full_precision_on_a_gpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    call = next_token(tokens(2, 512))
    reference = wide_mamba2()
    want = measure(reference, lambda: call(reference))
    model = wide_mamba2().cuda()
    compiled = adjcomp.compile(model)
    got = measure(model, lambda: next_token(tokens(2, 512).cuda())(compiled))
    on_cpu = replace(got, grads={name: g.cpu() for name, g in got.grads.items()})
    assert distance(on_cpu, want) <= 2e-5
