"""`python -m adjcomp.runtime.kernels.triton.tune`: measures configurations on this GPU and writes the best into table.json.

Every row that a call of the catalogue takes is varied by one step in one constant, or in its warps, as long as that makes the
call faster; a variant that gives other numbers or doesn't run is passed over. What beats the common row by MARGIN becomes a row
of this architecture, before the common ones. `make kernels` then checks the new rows like all others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adjcomp.runtime.kernels.triton import catalogue, configs
from adjcomp.runtime.kernels.triton.configs import ANY, Config, Row
from adjcomp.runtime.kernels.triton.launch import recorded

MARGIN = 0.03  # a smaller gain is noise
ROUNDS = 3  # steps away from the common row at most
MOST_WARPS = 16
LEAST_BLOCK = 16
REPEATS = 15
TOLERANCE = 2e-2  # relative, of bfloat16 sums in another order

Measure = Callable[[Row], float | None]  # seconds with a row in front of the table; None where it fails


def variants(config: Config) -> Iterator[Config]:
    """The configurations one step away."""
    for name, size in config.constants.items():
        for other in (size // 2, size * 2):
            if other >= (LEAST_BLOCK if name.startswith("BLOCK") else 1):
                yield replace(config, constants={**config.constants, name: other})
    for warps in (config.warps // 2, config.warps * 2):
        if 1 <= warps <= MOST_WARPS:
            yield replace(config, warps=warps)


def improved(row: Row, architecture: str, measure: Measure) -> Row | None:
    """The best row for an architecture that ROUNDS steps lead to, None where none is faster by MARGIN."""
    start = measure(row)
    if start is None:
        return None
    best, seconds = row, start
    for _ in range(ROUNDS):
        tried = [replace(row, config=config, architecture=architecture) for config in variants(best.config)]
        times = [(found, candidate) for candidate in tried if (found := measure(candidate)) is not None]
        fastest = min(times, key=lambda pair: pair[0], default=(seconds, best))
        if fastest[0] >= seconds:
            break
        seconds, best = fastest
    return best if seconds < (1 - MARGIN) * start else None


def taken(call: catalogue.Call, dtype: torch.dtype) -> list[Row]:
    """The rows of the common table that a call's launches take."""
    with recorded() as notes:
        catalogue.exhaust(call, dtype)
    used = [note.config for note in notes]
    return [row for row in configs.rows() if row.architecture == ANY and row.config in used]


def tensors_of(results: object) -> Iterator[Tensor]:
    """All tensors in what ops return."""
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, Sequence):
        for part in results:
            yield from tensors_of(part)


def _same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(bool((p - q).norm() <= TOLERANCE * q.norm()) for p, q in zip(found, wanted, strict=True))


def clock(call: catalogue.Call, dtype: torch.dtype) -> Measure:
    """Median seconds of a call on the current GPU; None where it fails, or gives other numbers than the common table."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)  # the tensors are drawn anew
        return [t for results in call(dtype) for t in tensors_of(results)]

    wanted = run()

    def measure(row: Row) -> float | None:
        with configs.table([row, *configs.installed()]):
            try:
                if not _same(run(), wanted):
                    return None
                found = []
                for _ in range(REPEATS):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    run()
                    torch.cuda.synchronize()
                    found.append(time.perf_counter() - start)
            except Exception:  # noqa: BLE001 - a variant that a compiler or driver refuses is not a choice
                return None
        return sorted(found)[REPEATS // 2]

    return measure


def main() -> int:
    """Tune every call in both number types; 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("the tuner measures on a GPU, and there is none", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    architecture = configs.target_of(device).architecture
    best: dict[tuple[str, str], Row] = {}
    with catalogue.place(device):
        for call in catalogue.CALLS:
            for dtype in (torch.bfloat16, torch.float32):
                measure = clock(call, dtype)
                for row in taken(call, dtype):
                    found = improved(row, architecture, measure)
                    if found is not None:
                        best[row.config.kernel, str(dict(row.limits))] = found
                        print(f"{row.config.kernel}: {row.config} -> {found.config}", flush=True)
    kept = [row for row in configs.installed() if row.architecture != architecture]
    configs.TABLE.write_text(configs.text([*best.values(), *kept]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
