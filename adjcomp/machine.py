"""Machines that plans are made for: devices, links between them, and how to name them.

`parse_machine` accepts "cpu", a profile ("a100-40gb"), a count of devices in one node ("a100-40gb:8"), nodes × devices
("h100-80gb:4x8"), or the path of a YAML file:

    devices:
      - {name: "big:0", profile: h200-141gb}
      - {name: "small:0", profile: a100-40gb, memory: 39GiB, node: 1}
    node_bandwidth: 50e9        # bytes per second between nodes, each way
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adjcomp.units import parse_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """A way between two devices (or a device and its host), used in one direction at a time."""

    bandwidth: float  # bytes per second, each way
    latency: float = 5e-6  # seconds until the first byte arrives

    def __post_init__(self) -> None:
        _positive("link bandwidth", self.bandwidth, 1e16)
        if not (math.isfinite(self.latency) and 0 <= self.latency < 10):
            raise ValueError(f"link latency must be between 0 and 10 seconds, not {self.latency!r}")

    def seconds(self, size: int) -> float:
        """Seconds to move `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One device: what it can hold and how fast it computes. Efficiencies are replaced by calibration."""

    name: str  # unique in its machine: "cpu", "a100-40gb:0"
    profile: str  # "a100-40gb"
    kind: str  # "cpu" or "cuda"
    memory_bytes: int  # usable device memory
    peak_flops: float  # dense FLOP/s, bf16 on accelerators, fp32 on CPUs
    memory_bandwidth: float  # bytes per second
    host_bandwidth: float  # bytes per second to pinned host memory, each way
    node: int = 0
    flops_efficiency: float = 0.6  # share of peak_flops that large matrix products reach
    memory_efficiency: float = 0.8  # share of memory_bandwidth that pointwise kernels reach

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ValueError(f"device {self.name}: memory must be positive, not {self.memory_bytes!r} bytes")
        _positive(f"device {self.name}: peak_flops", self.peak_flops, 1e20)
        _positive(f"device {self.name}: memory bandwidth", self.memory_bandwidth, 1e16)
        _positive(f"device {self.name}: host bandwidth", self.host_bandwidth, 1e16)
        for label, share in (("flops_efficiency", self.flops_efficiency), ("memory_efficiency", self.memory_efficiency)):
            if not 0 < share <= 1:
                raise ValueError(f"device {self.name}: {label} must be in (0, 1], not {share!r}")

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Roofline seconds of work that computes `flops` and moves `moved_bytes` through device memory."""
        return max(
            flops / (self.peak_flops * self.flops_efficiency), moved_bytes / (self.memory_bandwidth * self.memory_efficiency)
        )


@dataclass(frozen=True)
class Machine:
    """Devices in nodes. Devices of a node are joined by `node_links[node]`, nodes by `network`."""

    name: str
    devices: tuple[Device, ...]
    node_links: dict[int, Link]
    network: Link

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise ValueError(f"machine {self.name!r} has no devices")
        if len(set(names)) < len(names):
            raise ValueError(f"machine {self.name!r} names a device twice: {', '.join(sorted(names))}")
        if missing := sorted({device.node for device in self.devices} - set(self.node_links)):
            raise ValueError(f"machine {self.name!r} has no link inside of node {missing[0]}")

    def link(self, source: int, target: int) -> Link:
        """The way from device `source` to device `target` (indices into `devices`)."""
        first, second = self.devices[source], self.devices[target]
        return self.node_links[first.node] if first.node == second.node else self.network


# Dense bf16 FLOP/s, memory bytes/s, usable GiB, link inside a node, to the host and between nodes (bytes/s each way).
_PROFILES: dict[str, tuple[float, float, float, float, float, float]] = {
    "a100-40gb": (312e12, 1555e9, 39.5, 300e9, 25e9, 50e9),
    "a100-80gb": (312e12, 2039e9, 79.2, 300e9, 25e9, 50e9),
    "h100-80gb": (989e12, 3350e9, 79.2, 450e9, 50e9, 400e9),
    "h200-141gb": (989e12, 4800e9, 139.8, 450e9, 50e9, 400e9),
    "mi300x": (1307e12, 5300e9, 191.5, 448e9, 50e9, 400e9),
}
_FORM = re.compile(r"([a-z0-9][a-z0-9-]*?)(?::(?:([0-9]+)x)?([0-9]+))?", re.ASCII)
_MOST_DEVICES = 65536


def known_profiles() -> tuple[str, ...]:
    """Names that `parse_machine` knows."""
    return ("cpu", *_PROFILES)


def parse_machine(text: str | Machine | Path) -> Machine:
    """The machine that `text` names (module docstring); a Machine is returned as it is.

    Raises:
        ValueError: an unknown name (the text lists the known ones), no devices, or absurd figures.
    """
    if isinstance(text, Machine):
        return text
    spelled = str(text)
    if isinstance(text, Path) or spelled.endswith((".yaml", ".yml")):
        return _read_yaml(Path(spelled))
    match = _FORM.fullmatch(spelled.strip().lower())
    if match is None or match[1] not in known_profiles():
        raise ValueError(
            f"unknown machine {spelled!r}; known: {', '.join(known_profiles())}; also with a count of devices ('a100-40gb:8'), "
            "nodes x devices ('h100-80gb:4x8'), or the path of a .yaml file"
        )
    nodes, per_node = int(match[2] or 1), int(match[3] or 1)
    if not 1 <= nodes * per_node <= _MOST_DEVICES:
        raise ValueError(f"machine {spelled!r} must have between 1 and {_MOST_DEVICES} devices")
    single = match[3] is None
    devices = [
        profile_device(match[1], name=match[1] if single else f"{match[1]}:{node * per_node + i}", node=node)
        for node in range(nodes)
        for i in range(per_node)
    ]
    return _join(spelled.strip().lower(), devices, None, None)


def profile_device(profile: str, *, name: str, node: int = 0) -> Device:
    """A device of a known profile. "cpu" has this computer's memory and the floors of two cores."""
    if profile == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device(name, profile, "cpu", memory, 130e9, 28e9, 28e9, node, flops_efficiency=0.8, memory_efficiency=0.6)
    if profile not in _PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(known_profiles())}")
    flops, bandwidth, gib, _, host, _ = _PROFILES[profile]
    return Device(name, profile, "cuda", int(gib * GIB), flops, bandwidth, host, node)


def _join(name: str, devices: list[Device], inside: float | None, between: float | None) -> Machine:
    """A machine of `devices`; links not given take the slowest of the profiles that they join."""
    links = {}
    for node in sorted({device.node for device in devices}):
        links[node] = Link(inside if inside is not None else min(_profile_links(d.profile)[0] for d in devices if d.node == node))
    if not devices:
        raise ValueError(f"machine {name!r} has no devices")
    network = Link(between if between is not None else min(_profile_links(d.profile)[1] for d in devices), latency=2e-5)
    return Machine(name, tuple(devices), links, network)


def _profile_links(profile: str) -> tuple[float, float]:
    """Bytes per second inside a node and between nodes."""
    return (28e9, 1.25e9) if profile == "cpu" else (_PROFILES[profile][3], _PROFILES[profile][5])


def profile_links(profile: str) -> tuple[Link, Link]:
    """The links of a known profile's devices: inside a node, and between nodes."""
    inside, between = _profile_links(profile)
    return Link(inside), Link(between, latency=2e-5)


def _read_yaml(path: Path) -> Machine:
    """The machine described in a YAML file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("machines in YAML files need PyYAML: pip install pyyaml") from error
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(data.get("devices"), list):
        raise ValueError(f"{path}: a machine file is a mapping with a list 'devices'")
    if unknown := sorted(set(data) - {"devices", "link_bandwidth", "node_bandwidth"}):
        raise ValueError(f"{path}: unknown entry {unknown[0]!r}; known: devices, link_bandwidth, node_bandwidth")
    devices = [_yaml_device(entry, index) for index, entry in enumerate(data["devices"])]
    inside, between = (None if data.get(key) is None else float(data[key]) for key in ("link_bandwidth", "node_bandwidth"))
    return _join(path.stem, devices, inside, between)


def _yaml_device(entry: dict[str, Any], index: int) -> Device:
    """One entry of a machine file: a profile and what differs from it."""
    known = {
        "name",
        "profile",
        "node",
        "memory",
        "peak_flops",
        "memory_bandwidth",
        "host_bandwidth",
        "flops_efficiency",
        "memory_efficiency",
    }
    if not isinstance(entry, dict) or "profile" not in entry:
        raise ValueError(f"device {index}: every device names a 'profile'; known: {', '.join(known_profiles())}")
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"device {index}: unknown entry {unknown[0]!r}; known: {', '.join(sorted(known))}")
    base = profile_device(
        entry["profile"], name=str(entry.get("name", f"{entry['profile']}:{index}")), node=int(entry.get("node", 0))
    )
    changes: dict[str, Any] = {key: float(entry[key]) for key in known - {"name", "profile", "node", "memory"} if key in entry}
    if "memory" in entry:
        changes["memory_bytes"] = parse_bytes(entry["memory"])
    return replace(base, **changes)


def _positive(what: str, value: float, most: float) -> None:
    """ValueError unless 0 < value <= most."""
    if not 0 < value <= most:
        raise ValueError(f"{what} must be above zero and at most {most:g}, not {value!r}")
