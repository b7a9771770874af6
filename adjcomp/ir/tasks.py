"""The tasks of a training step as a graph, before any choice is made, and the graph of a plan's actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import networkx

from adjcomp.ir.actions import Adjoint, HeadVjp, Publish
from adjcomp.ir.plan import Plan
from adjcomp.ir.transfers import Fetch, Load, Offload
from adjcomp.ir.values import Value, value_bytes


class TaskKind(StrEnum):
    """What a task does."""

    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    HEAD_VJP = "head vjp"
    ADJOINT = "adjoint"
    PARAMETER_VJP = "parameter vjp"


@dataclass(frozen=True, order=True)
class Task:
    """One task on one tile. Its cost is an attribute of its node, so that a task is a key and nothing else."""

    kind: TaskKind
    layer: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.layer},{self.chunk}"


@dataclass(frozen=True)
class TaskGraph:
    """Tasks and what they hand to each other.

    `graph` has Tasks as nodes, with `flops`, `seconds` and `workspace_bytes`; an edge has the `values` that its first task
    makes for the second and their `bytes`. Two tasks without a path between them may run in any order, or at once on two
    devices.
    """

    graph: networkx.DiGraph = field(repr=False)

    def __post_init__(self) -> None:
        if not networkx.is_directed_acyclic_graph(self.graph):
            cycle = " -> ".join(str(edge[0]) for edge in networkx.find_cycle(self.graph))
            raise ValueError(f"these tasks wait for each other in a circle: {cycle}")

    def critical_seconds(self) -> float:
        """Seconds of the longest chain of tasks, each waiting for the one before."""
        finish: dict[Task, float] = {}
        for task in networkx.topological_sort(self.graph):
            ready = max((finish[before] for before in self.graph.predecessors(task)), default=0.0)
            finish[task] = ready + self.graph.nodes[task]["seconds"]
        return max(finish.values(), default=0.0)


def action_graph(plan: Plan) -> networkx.DiGraph:
    """Actions as nodes (their positions), with `action` and `seconds`; edges with the `values` handed on and their `bytes`.

    An action that makes a value again doesn't wait for the one that made it before. The graph is acyclic, because the positions
    are an order that runs.
    """
    graph = networkx.DiGraph()
    maker: dict[tuple[int, Value], int] = {}
    last_adjoint: dict[int, int] = {}
    stored: dict[tuple[int, Value], int] = {}  # the Offload of a value
    for index, action in enumerate(plan.actions):
        graph.add_node(index, action=action, seconds=action.seconds(plan.costs))
        sources: dict[int, list[Value]] = {}
        for value in action.reads(plan.costs):
            if (source := maker.get((action.device, value))) is not None:
                sources.setdefault(source, []).append(value)
        if isinstance(action, Publish) and action.layer in last_adjoint:
            sources.setdefault(last_adjoint[action.layer], [])
        if isinstance(action, Offload):
            stored[action.device, action.value] = index
        elif isinstance(action, Fetch) and (action.device, action.value) in stored:
            sources.setdefault(stored.pop((action.device, action.value)), []).append(action.value)
        elif isinstance(action, Load) and (action.device, action.value) in stored:
            sources.setdefault(stored[action.device, action.value], []).append(action.value)
        for source, values in sources.items():
            graph.add_edge(source, index, values=tuple(values), bytes=sum(value_bytes(plan.costs, value) for value in values))
        for value in action.writes(plan.costs):
            maker[action.device, value] = index
        if isinstance(action, Adjoint | HeadVjp):
            last_adjoint[plan.costs.head if isinstance(action, HeadVjp) else action.layer] = index
    return graph
