"""What tiles hand to the epilogue: partial sums where an op reduces over time, final states, per-token outputs for the rest."""

from __future__ import annotations

import operator

from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.cut import is_final_state, is_loss_share, where
from adjcomp.passes.reductions import Partial, partial_sum
from adjcomp.passes.whole import Whole


def find_outputs(whole: Whole) -> None:
    """Fill in `whole.sums`, `whole.finals` and `whole.outs`."""
    cut, dropped = whole.cut, whole.dropped_outputs()
    for node in whole.graph.nodes:
        if node in cut.late and node.op == "call_function":
            _late_sources(whole, node)
    for i, node in enumerate(whole.output_nodes()):
        if i not in dropped and node in cut.activations:
            _add_out(whole, node)
    for name, node in zip(whole.updates, whole.update_nodes(), strict=True):
        if node in cut.activations:
            _check_update(whole, name, node)
            _add_out(whole, node)


def _check_update(whole: Whole, name: str, node: fx.Node) -> None:
    if name not in whole.inputs:
        raise CaptureError(f"{where(node)}: buffer {name!r} is overwritten with activations of the whole sequence")


def _late_sources(whole: Whole, node: fx.Node) -> None:
    if is_final_state(node):
        if not any(known.args[0] is node.args[0] for known in whole.finals):
            whole.finals.append(node)
    elif is_loss_share(node):
        whole.sums.append(Partial.read(node))
    elif any(a in whole.cut.activations for a in node.all_input_nodes) and not _is_read_of_late(node, whole):
        partials = partial_sum(node, whole.traced.time)
        if partials is not None:
            whole.sums.extend(partials)
            return
        for source in node.all_input_nodes:
            if source in whole.cut.activations:
                _add_out(whole, source)


def _is_read_of_late(node: fx.Node, whole: Whole) -> bool:
    return node.target is operator.getitem and node.args[0] in whole.cut.late


def _add_out(whole: Whole, node: fx.Node) -> None:
    if node not in whole.cut.home:
        raise CaptureError(
            f"{where(node)}: an output combines several points of the residual stream in {node.target}; return them separately"
        )
    if node not in whole.outs:
        whole.outs.append(node)
