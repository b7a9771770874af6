"""The plan: what the planner writes, the verifier proves, the runtime runs and a file keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts

if TYPE_CHECKING:
    import networkx

    from adjcomp.ir.tasks import TaskGraph


class Status(StrEnum):
    """How good the planner can promise a plan to be."""

    OPTIMAL = "optimal"  # nothing in the stated plan space is faster, up to the printed gap of rounding
    FEASIBLE = "feasible"  # the search ended first; the gap bounds what is left to gain
    HEURISTIC = "heuristic"  # no search was run: a constructive plan beside the lower bound


@dataclass(frozen=True)
class HostTier:
    """Pinned host memory beside a device, for borders that are spilled; its two directions don't slow each other down."""

    budget_bytes: int  # most bytes of this device's values there
    bandwidth: float  # bytes per second, each way
    latency: float  # seconds until the first byte arrives

    def seconds(self, size: int) -> float:
        """Seconds to move `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Share:
    """What one device brings to the plan and holds during the whole step."""

    name: str  # "cpu", "cuda:0", …; unique in a plan
    budget_bytes: int
    resident_bytes: dict[str, int]  # live during the whole step, by kind
    turn_bytes: dict[str, int]  # live from the Turn on, by kind
    speed: float = 1.0  # how many times as fast as the plan's cost tables say
    host: HostTier | None = None  # where values may be offloaded to


@dataclass(frozen=True)
class Wiring:
    """The links between the devices of a plan: (bytes per second, seconds until the first byte) in one direction."""

    nodes: tuple[int, ...]  # node of each device
    links: tuple[tuple[float, float], ...]  # inside of each node
    network: tuple[float, float]  # between nodes

    def seconds(self, source: int, target: int, size: int) -> float:
        """Seconds to move `size` bytes from device `source` to device `target`."""
        same = self.nodes[source] == self.nodes[target]
        bandwidth, latency = self.links[self.nodes[source]] if same else self.network
        return latency + size / bandwidth

    def sum_seconds(self, devices: tuple[int, ...], size: int) -> float:
        """Seconds to add `size` bytes over n `devices`: 2 (n - 1) / n of them pass the slowest link, in 2 (n - 1) steps of a ring
        or twice log n of halving and doubling, as libraries choose.
        """
        if len(devices) < 2:
            return 0.0
        pairs = set(zip(devices, (*devices[1:], devices[0]), strict=True))
        step = max(self.seconds(a, b, size // len(devices)) for a, b in pairs)
        others, latency = len(devices) - 1, min(step, max(self.seconds(a, b, 0) for a, b in pairs))
        return 2 * min(others * step, others * (step - latency) + others.bit_length() * latency)


@dataclass(frozen=True)
class Certificate:
    """What the planner promises; `Plan.verify` recomputes all but the bound."""

    peak_bytes: dict[str, int]  # device name -> most bytes live at any action
    bytes_by_kind: dict[str, dict[str, int]]  # device name -> kind -> bytes at the action of the peak; they sum to the peak
    seconds: float  # predicted seconds of a step
    lower_bound_seconds: float  # no plan of `space` within the budget takes less
    status: Status
    space: str  # the plan space that the bound speaks of, in words
    chunks: tuple[int, ...]  # chunk lengths of that space, tokens
    host_peak_bytes: dict[str, int] = field(default_factory=dict)  # device name -> most bytes on its host, where it has a tier

    @property
    def gap(self) -> float:
        """(seconds - lower bound) / seconds: the share of the step that a better plan could save at most."""
        return (self.seconds - self.lower_bound_seconds) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """Actions of one training step, the costs they were chosen by, and the certificate.

    `actions` are in an order that runs on one device as it stands; with several devices each runs its own actions in this order.
    """

    costs: StackCosts
    shares: tuple[Share, ...]  # index = `Action.device`
    certificate: Certificate
    actions: tuple[Action, ...]
    wiring: Wiring | None = None  # the links of several devices

    @property
    def chunk(self) -> int:
        """Chunk length, tokens."""
        return self.costs.chunk

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Device name -> predicted peak, bytes."""
        return dict(self.certificate.peak_bytes)

    @property
    def host_peak_bytes(self) -> dict[str, int]:
        """Device name -> most bytes offloaded to pinned host memory at a time; devices without that tier are not named."""
        return dict(self.certificate.host_peak_bytes)

    @property
    def budget_bytes(self) -> dict[str, int]:
        """Device name -> budget, bytes."""
        return {share.name: share.budget_bytes for share in self.shares}

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Kind -> bytes at the peak of the device that is closest to its budget."""
        peaks, budgets = self.certificate.peak_bytes, self.budget_bytes
        tightest = max(peaks, key=lambda name: peaks[name] / max(budgets[name], 1))
        return dict(self.certificate.bytes_by_kind[tightest])

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.certificate.seconds

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds that no plan of the stated space can beat within the budget."""
        return self.certificate.lower_bound_seconds

    @property
    def gap(self) -> float:
        """(seconds - lower bound) / seconds."""
        return self.certificate.gap

    @property
    def status(self) -> Status:
        """How the gap came about."""
        return self.certificate.status

    @cached_property
    def graph(self) -> networkx.DiGraph:
        """The plan's actions as nodes (by position) and the values they hand to each other as edges."""
        from adjcomp.ir.tasks import action_graph

        return action_graph(self)

    @cached_property
    def task_graph(self) -> TaskGraph:
        """What the plan was made from: the step's tasks on its tiles and what they wait for, before anything was decided."""
        from adjcomp.ir.taskgraph import task_graph

        return task_graph(self.costs)

    def verify(self) -> None:
        """Replay every action; VerifyError shows the first that breaks a rule or a budget, or a wrong certificate."""
        from adjcomp.ir.verify import verify_plan

        verify_plan(self)

    def to_json(self) -> str:
        """The plan as JSON, byte for byte the same for equal plans; one action a line."""
        from adjcomp.ir.serialize import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; ValueError names what is wrong with any other text."""
        from adjcomp.ir.serialize import plan_from_json

        return plan_from_json(text)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one page that needs nothing else: memory over time, what runs when, where internals come from."""
        from adjcomp.report.html import plan_html

        Path(path).write_text(plan_html(self), encoding="utf-8")

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a trace in Chrome's JSON format, for https://ui.perfetto.dev or chrome://tracing."""
        from adjcomp.report.perfetto import plan_trace

        Path(path).write_text(plan_trace(self), encoding="utf-8")

    def __str__(self) -> str:
        from adjcomp.report.text import plan_text

        return plan_text(self)


def total(kinds: Mapping[str, int]) -> int:
    """Bytes of all kinds together."""
    return sum(kinds.values())
