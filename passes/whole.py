"""The whole traced graph, analysed: what time sharding cuts into tiles, and the whole-sequence values it finds on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.bypass import make_again
from adjcomp.passes.capture import TracedModel
from adjcomp.passes.carried import ATTENTION
from adjcomp.passes.cleanup import clean
from adjcomp.passes.cut import Cut, find_cut
from adjcomp.passes.functionalize import functionalize
from adjcomp.passes.losses import logits_of_losses
from adjcomp.passes.packing import check_attended, check_packing
from adjcomp.passes.reductions import Partial
from adjcomp.passes.timeanalysis import analyse_time
from adjcomp.passes.timeaxis import NodeTime, TimeLayout

aten = torch.ops.aten


@dataclass(frozen=True)
class Trainable:
    """What wants a gradient: names of parameters, paths of input tensors, and whether given initial states do."""

    parameters: frozenset[str]
    inputs: frozenset[str]
    states: bool = False


@dataclass
class Whole:
    """The traced graph, analysed, and the whole-sequence values found while tiles are built.

    graph: outputs are the model's, then the last values of `updates`. state: placeholders of parameters and of buffers that the
    model
    does not change, by placeholder name. updates: buffers and inputs that the model changes in forward; updated: their
    placeholders.
    """

    traced: TracedModel
    graph: fx.Graph
    state: dict[str, fx.Node]
    state_names: dict[str, str]  # placeholder name -> parameter or buffer name
    inputs: dict[str, fx.Node]  # input placeholders by path
    times: dict[fx.Node, NodeTime]
    cut: Cut
    grad_nodes: frozenset[fx.Node]
    updates: tuple[str, ...]
    updated: frozenset[fx.Node]
    states_wanted: bool
    sides: list[fx.Node] = field(default_factory=list)
    initial: list[fx.Node] = field(default_factory=list)
    finals: list[fx.Node] = field(default_factory=list)
    outs: list[fx.Node] = field(default_factory=list)
    sums: list[Partial] = field(default_factory=list)

    def output_nodes(self) -> list[fx.Node]:
        """The model's outputs."""
        return self._results()[: len(self._results()) - len(self.updates)]

    def update_nodes(self) -> list[fx.Node]:
        """The last values of what the model changes, in the order of `updates`."""
        results = self._results()
        return results[len(results) - len(self.updates) :]

    def _results(self) -> list[fx.Node]:
        return list(next(n for n in self.graph.nodes if n.op == "output").args[0])  # type: ignore[arg-type]

    def dropped_outputs(self) -> frozenset[int]:
        """Outputs that are the logits behind a loss which is itself an output: they are not materialised."""
        hidden = logits_of_losses(self.graph)
        return frozenset(i for i, n in enumerate(self.output_nodes()) if n in hidden)


def analyse(traced: TracedModel, trainable: Trainable) -> Whole:
    """Make a traced graph functional and clean, find time in it and cut it. Raises CaptureError."""
    names = (*traced.parameter_names, *traced.buffer_names)
    paths = tuple(i.path for i in traced.inputs)
    functional = functionalize(
        traced.graph.graph,
        names=(*names, *paths),
        parameters=frozenset(traced.parameter_names),
        wanted=trainable.parameters | trainable.inputs,
        reassigned=traced.reassigned,
    )
    graph = clean(functional.graph, traced.time)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    state, inputs = placeholders[: len(names)], placeholders[len(names) :]
    check_packing((i.path, i.restarts) for n, i in zip(inputs, traced.inputs, strict=True) if not n.users)
    if graph.find_nodes(op="call_function", target=ATTENTION):
        check_attended((i.path, i.jumps) for i in traced.inputs)
    layouts: dict[fx.Node, TimeLayout | None] = dict.fromkeys(state)
    layouts.update(
        {n: None if i.time_dim is None else TimeLayout(i.time_dim) for n, i in zip(inputs, traced.inputs, strict=True)}
    )
    times = analyse_time(graph, traced.time, layouts)
    by_path = dict(zip(paths, inputs, strict=True))
    weights = [n for n in state if n.meta["val"].is_floating_point() or n.meta["val"].is_complex()]
    main = _main_input(by_path, times)
    roots = [*weights, *([main] if main is not None else [])]
    make_again(graph, times, roots)
    cut = find_cut(graph, times, roots)
    by_name = {**dict(zip(names, state, strict=True)), **by_path}
    updated = frozenset(by_name[name] for name in functional.updated)
    wanted = [by_name[name] for name in (*trainable.parameters, *trainable.inputs) if name in by_name]
    grad_nodes = _grad_nodes(graph, wanted)
    _check_reached(graph, grad_nodes, trainable)
    return Whole(
        traced=traced,
        graph=graph,
        state={n.name: n for n in state if n not in updated},
        state_names={n.name: name for n, name in zip(state, names, strict=True)},
        inputs=by_path,
        times=times,
        cut=cut,
        grad_nodes=grad_nodes,
        updates=functional.updated,
        updated=updated,
        states_wanted=trainable.states,
    )


def _check_reached(graph: fx.Graph, grad_nodes: frozenset[fx.Node], trainable: Trainable) -> None:
    """CaptureError where nothing that wants a gradient reaches any output: backward would fail, or train nothing."""
    if trainable == Trainable(frozenset(), frozenset()):
        return  # a call without gradients
    results = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    if any(n in grad_nodes for n in results) or not any(n.meta["val"].is_floating_point() for n in results):
        return
    names = sorted((*trainable.parameters, *trainable.inputs))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    raise CaptureError(f"no output of the model depends on what wants a gradient ({shown}): it is never read in forward")


def _main_input(inputs: dict[str, fx.Node], times: dict[fx.Node, NodeTime]) -> fx.Node | None:
    """The float sequence that the model transforms, where it has one: the first (B, T, …) float input of three dimensions,
    else of two.
    """
    sequences = [n for n in inputs.values() if times[n].layout is not None and n.meta["val"].is_floating_point()]
    wide = [n for n in sequences if n.meta["val"].ndim >= 3]
    integers = [n for n in inputs.values() if not n.meta["val"].is_floating_point()]
    if wide:
        return wide[0]
    return sequences[0] if sequences and not integers else None


def _grad_nodes(graph: fx.Graph, wanted: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Nodes through which a wanted gradient flows: float values computed from what wants one, outside of no_grad."""
    found = set(wanted)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("no_grad") or node.target is aten.detach.default:
            continue
        value = node.meta.get("val")
        single = isinstance(value, torch.Tensor)
        if single and not (value.is_floating_point() or value.is_complex()):
            continue
        if (single or isinstance(value, tuple | list)) and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return frozenset(found)
