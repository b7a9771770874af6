"""Derivative formulas that write in place: functional in the joint graph, so that bytes are counted right."""

from __future__ import annotations

import pytest
import torch
from fidelity import Residual, compare
from torch import Tensor, fx, nn

import adjcomp
from adjcomp.errors import CaptureError
from adjcomp.passes.inplace import out_of_place

aten = torch.ops.aten


class Normalized(nn.Module):
    """`normalize` has a derivative that fills a temporary in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u = nn.functional.normalize(self.maps(x), dim=-1)
        return x + adjcomp.ops.linear_scan(torch.sigmoid(u), u)[0]


def test_bytes_are_predicted_exactly() -> None:
    model = Residual([Normalized(6) for _ in range(2)], 6).double()
    ids = torch.randint(0, 31, (2, 40))
    compiled = adjcomp.compile(model, chunk=11)
    compare(model, compiled, lambda m: m(ids).square().mean(), 1e-10)
    assert compiled.stats.predicted_peak_bytes == compiled.stats.measured_peak_bytes


def graph_of(through_view: bool) -> fx.Graph:
    """x · 2, filled where a mask says so (through a view of it, or itself), plus one."""
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    for node in (x, mask):
        node.meta["val"] = torch.ones(3)
    double = graph.call_function(aten.mul.Tensor, (x, 2))
    seen = graph.call_function(aten.view.default, (double, [3])) if through_view else double
    graph.call_function(aten.masked_fill_.Scalar, (seen, mask, 0.0))
    graph.output((graph.call_function(aten.add.Tensor, (double, 1)),))
    return graph


def test_later_readers_see_what_was_written() -> None:
    graph = graph_of(through_view=False)
    out_of_place(graph)
    run = fx.GraphModule({}, graph)
    assert not any(n.target is aten.masked_fill_.Scalar for n in graph.nodes)
    assert run(torch.ones(3), torch.tensor([True, False, True]))[0].tolist() == [1.0, 3.0, 1.0]


def test_a_write_through_a_view_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"masked_fill_.Scalar writes into a value that others see"):
        out_of_place(graph_of(through_view=True))
