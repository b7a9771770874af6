"""Machines: names, counts, files, and figures that can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjcomp.machine import GIB, Link, Machine, known_profiles, parse_machine
from adjcomp.options import Options


def test_profiles_counts_and_nodes_are_read_from_their_names() -> None:
    single, node, cluster = (parse_machine(name) for name in ("a100-80gb", "a100-40gb:8", "h100-80gb:4x8"))
    assert [len(machine.devices) for machine in (single, node, cluster)] == [1, 8, 32]
    assert single.devices[0].name == "a100-80gb"
    assert node.devices[3].name == "a100-40gb:3"
    assert node.devices[0].memory_bytes == int(39.5 * GIB)
    assert [device.node for device in cluster.devices[::8]] == [0, 1, 2, 3]
    assert cluster.link(0, 7).bandwidth == 450e9
    assert cluster.link(0, 8).bandwidth == 400e9
    assert node.link(0, 1).bandwidth == 300e9


def test_a_machine_is_its_own_name_and_the_cpu_has_memory() -> None:
    machine = parse_machine("cpu")
    assert parse_machine(machine) is machine
    assert machine.devices[0].memory_bytes > 0


@pytest.mark.parametrize("name", ["b9000", "a100", "a100-40gb:", "a100-40gb:x8", "", "a100-40gb:2x"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="unknown machine") as caught:
        parse_machine(name)
    assert all(known in str(caught.value) for known in known_profiles())


@pytest.mark.parametrize("name", ["a100-40gb:0", "a100-40gb:0x8", "a100-40gb:9999999"])
def test_absurd_counts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        parse_machine(name)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, 1e30, float("nan"), float("inf")])
def test_a_link_has_a_possible_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Link(bandwidth)


def test_a_file_describes_unequal_devices(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "lab.yaml"
    file.write_text(
        "devices:\n  - {profile: h200-141gb}\n"
        "  - {name: small, profile: a100-40gb, memory: 39GiB, node: 1, memory_efficiency: 0.5}\n"
        "node_bandwidth: 1e10\n"
    )
    machine = parse_machine(str(file))
    assert [device.name for device in machine.devices] == ["h200-141gb:0", "small"]
    assert machine.devices[1].memory_bytes == 39 << 30
    assert machine.devices[1].memory_efficiency == 0.5
    assert machine.link(0, 1).bandwidth == 1e10


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("devices: []", "no devices"),
        ("devices: 3", "list 'devices'"),
        ("devices: [{profile: b9000}]", "b9000"),
        ("devices: [{name: a}]", "profile"),
        ("devices: [{profile: a100-40gb, speed: 3}]", "speed"),
        ("devices: [{profile: a100-40gb, memory: lots}]", "lots"),
        ("devices: [{profile: a100-40gb, peak_flops: 0}]", "peak_flops"),
        ("devices: [{profile: a100-40gb}]\nnode_bandwidth: 0", "bandwidth"),
        ("devices: [{profile: a100-40gb}]\nbandwith: 3", "bandwith"),
        ("devices: [{profile: a100-40gb, name: a}, {profile: a100-40gb, name: a}]", "twice"),
    ],
)
def test_a_wrong_file_is_refused_by_its_culprit(tmp_path: Path, text: str, culprit: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=culprit):
        parse_machine(file)


def test_a_machine_needs_a_link_in_each_node() -> None:
    machine = parse_machine("a100-40gb:2")
    with pytest.raises(ValueError, match="node 0"):
        Machine("broken", machine.devices, {}, machine.network)


@pytest.mark.parametrize(
    "wrong",
    [
        {"placement": "diagonal"},
        {"deterministic": 1},
        {"solver_time_limit_seconds": -1.0},
        {"solver_time_limit_seconds": float("nan")},
        {"solver_time_limit_seconds": "soon"},
        {"collective_timeout_seconds": 0},
        {"collective_timeout_seconds": True},
    ],
)
def test_options_refuse_what_they_cannot_mean(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises((ValueError, TypeError), match=name):
        Options(**wrong)  # type: ignore[arg-type]
