"""Compiles launches for GPUs that need not be there, and keeps what came of each in the cache folder."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adjcomp.runtime.cache import private_folder, write_atomically
from adjcomp.runtime.kernels.triton.launch import Launch
from adjcomp.runtime.kernels.triton.resources import CHIPS, measure

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SCALAR_BITS = 16  # a kernel whose widest load is no wider reads one bf16 at a time
SCALAR_KERNELS = {"counter_uniform_rows"}  # it reads a seed and an offset, and nothing else
FORMAT = 2  # of the cached rows


@dataclass(frozen=True)
class Row:
    """One kernel in one configuration on one target; registers and spills are per thread, shared bytes per block."""

    kernel: str
    config: str
    target: str
    types: str  # element types of the pointers
    registers: int
    spill_bytes: int
    shared_bytes: int
    widest_load: int  # bits
    occupancy: float
    seconds: float
    family: str  # the kernel's name in the table of configurations
    table_bytes: int  # shared memory per block as the table has it
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """Why this row must not be shipped."""
        limit = CHIPS[self.target].shared_per_block
        found = [self.error] if self.error else []
        if self.spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes")
        if self.shared_bytes > limit:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, {self.target} has {limit}")
        if self.shared_bytes > self.table_bytes:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, table.json says {self.table_bytes}: --update")
        if not self.error and self.widest_load <= SCALAR_BITS and self.kernel not in SCALAR_KERNELS:
            found.append(f"reads only {self.widest_load} bits at a time")
        return found


def types_of(launch: Launch) -> str:
    """Which element types a launch has, e.g. "bf16 fp32"."""
    return " ".join(sorted({kind[1:] for kind in launch.signature.values() if kind.startswith("*")}))


def key(launch: Launch, target: str) -> str:
    """Digest of all that the compiled kernel depends on."""
    parts = [FORMAT, triton.__version__, launch.kernel.cache_key, sorted(launch.signature.items()), launch.aligned]
    parts += [sorted((name, repr(value)) for name, value in launch.constants.items()), str(launch.config), target]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def row(launch: Launch, target: str) -> Row:
    """The row of a launch, from the cache where it is there."""
    path = private_folder("kernel-rows") / f"{key(launch, target)}.json"
    if path.exists():
        return replace(Row(**json.loads(path.read_text())), table_bytes=launch.config.shared_bytes)
    made = _compile(launch, target)
    if not made.error:
        write_atomically(path, json.dumps(asdict(made)).encode())
    return made


def _compile(launch: Launch, target: str) -> Row:
    config = launch.config
    blank = Row(launch.name, str(config), target, types_of(launch), 0, 0, 0, 0, 0.0, 0.0, config.kernel, config.shared_bytes)
    indices = {name: (index,) for index, name in enumerate(launch.signature)}
    hints: dict[Any, Any] = {indices[name]: [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), {indices[n]: v for n, v in launch.constants.items()}, hints)
    start = time.perf_counter()
    try:
        compiled = triton.compile(source, target=TARGETS[target], options=config.options(target.startswith("sm")))
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the row's fault, and the others go on
        return replace(blank, error=f"{type(error).__name__}: {str(error)[-500:]}")
    seconds = time.perf_counter() - start
    found = measure(compiled, Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    occupancy = found.occupancy(CHIPS[target], config.warps)
    return replace(blank, **asdict(found), occupancy=round(occupancy, 3), seconds=round(seconds, 3))
