"""What a compiled kernel needs of a GPU, read from its binary and its assembly: registers, stack, shared memory, widest load."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVIDIA_WIDTH = re.compile(r"ld\.global(?:\.[a-z0-9_:]+)*?(?:\.v(\d))?\.[bfsu](\d+)")
NVIDIA_COPY = re.compile(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)")
AMD_WIDTH = re.compile(r"(?:global|buffer|flat)_load_(?:dwordx(\d)|dword|(?:u?short|[us]?byte|d16)\w*|b(\d+)|[us]16|[us]8)")


@dataclass(frozen=True)
class Chip:
    """A GPU: how many multiprocessors it has, and the limits of one."""

    processors: int
    registers: int  # 32-bit registers of all lanes
    registers_per_lane: int
    granularity: int  # registers per lane come in multiples of this
    warps: int
    blocks: int
    shared_bytes: int  # of a multiprocessor
    shared_per_block: int
    reserved_bytes: int  # that every block takes beside its own
    lanes: int = 32


CHIPS = {
    "sm_80": Chip(108, 65536, 255, 8, 64, 32, 164 << 10, 163 << 10, 1 << 10),
    "sm_90": Chip(132, 65536, 255, 8, 64, 32, 228 << 10, 227 << 10, 1 << 10),
    "sm_100": Chip(148, 65536, 255, 8, 64, 32, 228 << 10, 227 << 10, 1 << 10),
    "gfx942": Chip(304, 4 * 512 * 64, 512, 8, 32, 16, 64 << 10, 64 << 10, 0, lanes=64),
}


@dataclass(frozen=True)
class Resources:
    """Per thread, except shared memory (per block) and the load (bits that one instruction of one thread reads)."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    widest_load: int

    def occupancy(self, chip: Chip, warps: int) -> float:
        """Share of a multiprocessor's warps that fit at once."""
        granted = -(-max(self.registers, 1) // chip.granularity) * chip.granularity
        by_registers = chip.registers // (granted * chip.lanes * warps)
        shared = self.shared_bytes + chip.reserved_bytes
        by_shared = chip.shared_bytes // shared if shared else chip.blocks
        return min(by_registers, by_shared, chip.blocks, chip.warps // warps) * warps / chip.warps


def measure(compiled: Any, tools: Path) -> Resources:
    """Read a kernel that `triton.compile` returned; `tools` holds NVIDIA's cuobjdump."""
    if "amdgcn" in compiled.asm:
        return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared, tools)


def _nvidia(cubin: bytes, ptx: str, shared: int, tools: Path) -> Resources:
    """A stack means that registers were spilled to it: kernels have no local arrays."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(_only(rf"\b{name}:(\d+)", text)) for name in ("REG", "STACK", "LOCAL"))
    widths = [int(count or 1) * int(bits) for count, bits in NVIDIA_WIDTH.findall(ptx)]
    asynchronous = [8 * int(size, 0) for size in NVIDIA_COPY.findall(ptx)]
    bulk = [128] if "cp.async.bulk" in ptx else []
    return Resources(registers, max(stack, local), shared, max([0, *widths, *asynchronous, *bulk]))


def _amd(assembly: str, shared: int) -> Resources:
    vector, accumulation = (int(_only(rf"\.{name}_count:\s+(\d+)", assembly)) for name in ("vgpr", "agpr"))
    spilled = int(_only(r"\.vgpr_spill_count:\s+(\d+)", assembly))  # those of scalar registers stay in lanes of vector registers
    scratch = int(_only(r"\.private_segment_fixed_size:\s+(\d+)", assembly))
    widths = [0]
    for found in AMD_WIDTH.finditer(assembly):
        words, bits = found.groups()
        widths.append(32 * int(words) if words else int(bits) if bits else 32 if found[0].endswith("dword") else 16)
    return Resources(max(vector, accumulation), max(4 * spilled, scratch), shared, max(widths))


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's output")
    return found[1]
