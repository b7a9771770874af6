"""Which block sizes a kernel runs with: the first row of table.json that fits kernel, architecture, shape and shared memory.

Rows for one architecture come from the tuner (`adjcomp.runtime.kernels.triton.tune`) and go before those for "any". Where a step
or torch is told to be deterministic only the rows for "any" count, so that another table or another GPU of the same kind changes
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adjcomp.runtime.kernels.determinism import is_fixed

TABLE = Path(__file__).with_name("table.json")
ANY = "any"
FIXED_PROGRAMS = 1024  # what deterministic mode aims at, whatever the device
PROGRAMS_PER_PROCESSOR = 12  # enough warps of memory requests in flight; more segments mean more border states


@dataclass(frozen=True)
class Config:
    """Constants of a kernel, or of several that share them, and how it is compiled."""

    kernel: str
    constants: Mapping[str, int]
    warps: int = 4
    stages: int = 1
    shared_bytes: int = 0  # measured by `make kernels`: the most that any target needs
    registers: int = 0  # most per thread on NVIDIA GPUs; 0 lets ptxas choose, which may spill a little for more warps

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.constants.items())
        cap = f" registers={self.registers}" if self.registers else ""
        return f"{sizes} warps={self.warps} stages={self.stages}{cap}"

    def options(self, nvidia: bool) -> dict[str, Any]:
        """How Triton is told. Fused multiply-adds are asked for, as Triton's default is about to change."""
        cap = {"maxnreg": self.registers} if nvidia and self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True, **cap}


@dataclass(frozen=True)
class Row:
    """A line of the table: `limits` are the largest sizes that the configuration is meant for."""

    config: Config
    architecture: str = ANY
    limits: Mapping[str, int] = field(default_factory=dict)

    def fits(self, kernel: str, architecture: str, shared_limit: int, sizes: Mapping[str, int]) -> bool:
        return (
            self.config.kernel == kernel
            and self.architecture == architecture
            and self.config.shared_bytes <= shared_limit
            and all(sizes[name] <= limit for name, limit in self.limits.items())
        )


@dataclass(frozen=True)
class Target:
    """What the choice needs to know about a device."""

    architecture: str  # "sm_90", "gfx942"; the device type where there is no GPU
    shared_limit: int  # bytes that one block may have
    processors: int


_forced: dict[str, Config] = {}
_ahead: Target | None = None
_table: tuple[Row, ...] | None = None


@functools.cache
def installed() -> tuple[Row, ...]:
    """The table as it was installed."""
    return tuple(parse(json.loads(TABLE.read_text())))


def rows() -> tuple[Row, ...]:
    """The table in use."""
    return installed() if _table is None else _table


def parse(entries: list[dict[str, Any]]) -> Iterator[Row]:
    """Rows from the JSON form."""
    for entry in entries:
        config = Config(**{name: value for name, value in entry.items() if name not in ("architecture", "limits")})
        yield Row(config, entry["architecture"], entry["limits"])


def text(table: Iterable[Row]) -> str:
    """The JSON form, one row a line."""
    lines = (json.dumps({"architecture": row.architecture, "limits": row.limits, **asdict(row.config)}) for row in table)
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n"


@functools.cache
def _cuda_target(index: int) -> Target:
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target(properties.gcnArchName.split(":")[0], 64 << 10, properties.multi_processor_count)
    architecture = f"sm_{properties.major}{properties.minor}"
    return Target(architecture, properties.shared_memory_per_block_optin, properties.multi_processor_count)


def target_of(device: torch.device) -> Target:
    """The device a tensor is on; on `meta` what is compiled ahead for. The interpreter (cpu) gets little parallelism."""
    if device.type == "meta" and _ahead is not None:
        return _ahead
    if device.type != "cuda":
        return Target(device.type, 1 << 30, 4)
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


def choose(kernel: str, device: torch.device, **sizes: int) -> Config:
    """The configuration for a kernel (by its name) at these sizes.

    Raises:
        ValueError: no configuration supports the sizes on this device.
    """
    if kernel in _forced:
        return _forced[kernel]
    return _choose(kernel, target_of(device), is_fixed(), tuple(sorted(sizes.items())))


@functools.lru_cache(maxsize=4096)
def _choose(kernel: str, target: Target, fixed: bool, sizes: tuple[tuple[str, int], ...]) -> Config:
    known = dict(sizes)
    for architecture in (ANY,) if fixed else (target.architecture, ANY):
        for row in rows():
            if row.fits(kernel, architecture, target.shared_limit, known):
                return row.config
    limits = [dict(row.limits) for row in rows() if row.config.kernel == kernel]
    raise ValueError(f"adjcomp kernel {kernel}: sizes {known} on {target}; supported: {limits}")


def segments(steps: int, programs: int, interval: int, device: torch.device, each: int = PROGRAMS_PER_PROCESSOR) -> int:
    """Steps of time that one program walks: a power of two times `interval`, at most what fills the device.

    `programs` is how many there are per segment (batch and channel blocks), `each` how many fill a processor.
    """
    wanted = FIXED_PROGRAMS if is_fixed() else each * target_of(device).processors
    length = interval
    while length < steps and -(-steps // (2 * length)) * programs >= wanted:
        length *= 2
    return length


@contextlib.contextmanager
def forced(config: Config) -> Iterator[None]:
    """Use `config` for its kernel (the tuner and the tests try them so)."""
    _forced[config.kernel] = config
    try:
        yield
    finally:
        del _forced[config.kernel]


@contextlib.contextmanager
def ahead(target: Target) -> Iterator[None]:
    """Take tensors on `meta` for those of a device that need not be there."""
    global _ahead
    before, _ahead = _ahead, target
    try:
        yield
    finally:
        _ahead = before


@contextlib.contextmanager
def table(replacement: Iterable[Row]) -> Iterator[None]:
    """Use another table (the tuner tries rows so)."""
    global _table
    before, _table = _table, tuple(replacement)
    _choose.cache_clear()
    try:
        yield
    finally:
        _table = before
        _choose.cache_clear()
