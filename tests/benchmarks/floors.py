"""A CPU's floors and how near they are, all in one process: `python tests/benchmarks/floors.py [--json FILE]`.

- The selective scan (4,096 steps, 512 channels, 16 states) against `torch.exp` of as many numbers as it has decays.
- SSD (24 heads of 64, 128 states) in tokens a second, forward, forward once more and backward, against the torch form.
- A training step (Mamba, width 256, 4 layers, vocabulary 1,000, 8,192 tokens, everything kept) against the matrix products of
  that step alone, each on the same tensors again and again, plus the scans alone.

Every ratio is a median over rounds in which all its parts are timed one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import adjcomp
from adjcomp import ops
from adjcomp.runtime.kernels.cpu import chunked_ssd

ROUNDS = 9
Run = Callable[[], object]


def seconds(run: Run) -> float:
    """One call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rounds(parts: dict[str, Run], count: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each part in each round, after one that does not count."""
    for run in parts.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(count):
        for name, run in parts.items():
            found[name].append(seconds(run))
    return found


def ratio(times: dict[str, list[float]], above: str, *below: str) -> float:
    """Median over rounds of one part's time over the sum of others'."""
    return statistics.median(a / sum(b) for a, *b in zip(times[above], *(times[name] for name in below), strict=True))


def scan() -> dict[str, float]:
    """The selective scan and all its gradients against exponentials."""
    steps, channels, states = 4096, 512, 16
    x, z, dt = torch.randn(1, steps, channels), torch.randn(1, steps, channels), torch.rand(1, steps, channels) * 0.1
    rates, skip = -torch.rand(channels, states) * 8, torch.randn(channels)
    into, out_of = torch.randn(1, steps, states), torch.randn(1, steps, states)
    leaves = [t.requires_grad_() for t in (x, dt, rates, into, out_of, skip, z)]
    plain = [t.detach() for t in leaves]
    quarter = torch.rand(steps * channels * states // 4)
    room, seed = torch.empty_like(quarter), torch.randn(1, steps, channels)
    _, _, kept = torch.ops.adjcomp.selective_scan(*plain, None, None, False)
    times = rounds(
        {
            "exp": lambda: [torch.exp(quarter, out=room) for _ in range(4)],
            "forward": lambda: ops.selective_scan(*plain),
            "vjp": lambda: torch.ops.adjcomp.selective_scan_vjp(seed, None, *plain, None, kept, False, [True] * 7 + [False] * 2),
            "both": lambda: torch.autograd.grad(ops.selective_scan(*leaves)[0], leaves, seed),
        },
        3 * ROUNDS,
    )
    return {
        "exp_ms": 1e3 * statistics.median(times["exp"]),
        "forward_ms": 1e3 * statistics.median(times["forward"]),
        "vjp_ms": 1e3 * statistics.median(times["vjp"]),
        "forward_over_exp": ratio(times, "forward", "exp"),
        "vjp_over_exp": ratio(times, "vjp", "exp"),
        "both_over_exp": ratio(times, "both", "exp"),
    }


def ssd() -> dict[str, float]:
    """Tokens a second through SSD and its torch form: forward, forward again and backward."""
    steps, heads, width, states = 2048, 24, 64, 128
    x, dt = torch.randn(1, steps, heads, width), torch.rand(1, steps, heads) * 0.1
    rates, skip = -torch.rand(heads), torch.randn(heads)
    into, out_of = torch.randn(1, steps, 1, states), torch.randn(1, steps, 1, states)
    arguments = (x, dt, rates, into, out_of, skip, None, None, None, False, None)
    seed, mask = torch.randn(1, steps, heads, width), [True] * 6 + [False] * 3

    def through(forward: Callable[..., tuple[torch.Tensor, ...]], backward: Callable[..., object]) -> None:
        forward(*arguments)
        kept = forward(*arguments)[2]
        backward(seed, None, *arguments[:8], kept, False, None, mask)

    kernels = torch.ops.adjcomp
    times = rounds(
        {
            "kernel": lambda: through(kernels.ssd, kernels.ssd_vjp),
            "torch": lambda: through(chunked_ssd.ssd, chunked_ssd.ssd_vjp),
        }
    )
    return {
        "tokens_per_second": steps / statistics.median(times["kernel"]),
        "torch_tokens_per_second": steps / statistics.median(times["torch"]),
        "times_faster": ratio(times, "torch", "kernel"),
    }


WIDTH, LAYERS, VOCABULARY, STATES, TOKENS = 256, 4, 1000, 16, 8192


def linear(rows: int, inner: int, outer: int, times: int, forwards: int = 1) -> Run:
    """A projection's products over `rows` rows: forward, cotangent of the input, and of the weight added to a sum."""
    x, g, weight = torch.randn(rows, inner), torch.randn(rows, outer), torch.randn(outer, inner)
    y, dx, dweight = torch.empty(rows, outer), torch.empty(rows, inner), torch.zeros(outer, inner)

    def run() -> None:
        for _ in range(times):
            for _ in range(forwards):
                torch.mm(x, weight.t(), out=y)
            torch.mm(g, weight, out=dx)
            dweight.addmm_(g.t(), x)

    return run


def step() -> dict[str, float]:
    """A step against its products and its scans."""
    import transformers

    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=STATES, num_hidden_layers=LAYERS, use_cache=False
    )
    model = transformers.MambaForCausalLM(config)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    compiled = adjcomp.compile(model)

    def whole() -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    whole()
    chunk = compiled.plan.chunk
    tiles, inner, rank = LAYERS * TOKENS // chunk, 2 * WIDTH, WIDTH // 16
    gemms = [
        linear(chunk, WIDTH, 2 * inner, tiles),
        linear(chunk, inner, rank + 2 * STATES, tiles),
        linear(chunk, rank, inner, tiles),
        linear(chunk, inner, WIDTH, tiles),
        linear(chunk, WIDTH, VOCABULARY, tiles // LAYERS, forwards=2),
    ]
    times = rounds(
        {
            "step": whole,
            "products": lambda: [run() for run in gemms],
            "scans": _scans(chunk, inner, tiles),
        }
    )
    return {
        "chunk": chunk,
        "step_ms": 1e3 * statistics.median(times["step"]),
        "products_ms": 1e3 * statistics.median(times["products"]),
        "scans_ms": 1e3 * statistics.median(times["scans"]),
        "step_over_floor": ratio(times, "step", "products", "scans"),
    }


def _scans(chunk: int, channels: int, tiles: int) -> Run:
    x, dt, z, seed = torch.randn(4, 1, chunk, channels)
    rates, skip, bias = -torch.rand(channels, STATES) * 8, torch.randn(channels), torch.randn(channels) - 4
    into, out_of = torch.randn(2, 1, chunk, STATES)
    arguments = (x, dt, rates, into, out_of, skip, z, bias)

    def run() -> None:
        for _ in range(tiles):
            kept = torch.ops.adjcomp.selective_scan(*arguments, None, True)[2]
            torch.ops.adjcomp.selective_scan_vjp(seed, None, *arguments, kept, True, [True] * 9)

    return run


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("parts", nargs="*", help="scan, ssd, step; all by default")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    measures = {"scan": scan, "ssd": ssd, "step": step}
    found = {name: measures[name]() for name in arguments.parts or measures}
    for name, row in found.items():
        print(f"{name:5s}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
