"""Projections that are read in part make that part alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from adjcomp.passes.narrowing import narrow_products
from adjcomp.passes.pruning import drop_dead

aten = torch.ops.aten


def traced(sizes: list[int], read: list[int], bias: bool, by_slices: bool) -> tuple[fx.GraphModule, list[Tensor]]:
    """A projection of (2, 5, 3) to parts of `sizes`, of which `read` are results."""
    width = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 5, 3), (width, 3), (width,))]

    def project(x: Tensor, weight: Tensor, shift: Tensor) -> list[Tensor]:
        rows, turned = aten.view.default(x, [10, 3]), aten.t.default(weight)
        flat = aten.addmm.default(shift, rows, turned) if bias else aten.mm.default(rows, turned)
        whole = aten.view.default(flat, [2, 5, width])
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        if by_slices:
            parts = [aten.slice.Tensor(whole, 2, a, a + n) for a, n in zip(starts, sizes, strict=True)]
        else:
            parts = aten.split_with_sizes.default(whole, sizes, -1)
        return [aten.exp.default(parts[i]) for i in read]

    with FakeTensorMode() as mode:
        module = make_fx(project, tracing_mode="real")(*(mode.from_tensor(t) for t in given))
    drop_dead(module.graph)
    return module, given


def widths(graph: fx.Graph) -> int:
    """Columns that products make, in all."""
    return sum(n.meta["val"].shape[-1] for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data(), st.booleans(), st.booleans())
def test_only_the_columns_that_are_read_are_made(sizes: list[int], data: st.DataObject, bias: bool, by_slices: bool) -> None:
    """Given a projection that is split, when some parts are dead, then the others stay what they are and cost what they must."""
    read = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    module, given = traced(sizes, read, bias, by_slices)
    before = module(*given)
    narrow_products(module.graph)
    module.recompile()
    for got, want in zip(module(*given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    assert widths(module.graph) == sum(sizes[i] for i in read)


def test_a_product_that_is_read_whole_stays_as_it_is() -> None:
    """Given another reader of all columns, then nothing is cut."""
    module, _ = traced([2, 3], [0], False, False)
    whole = next(n for n in module.graph.nodes if n.target is aten.mm.default)
    output = next(n for n in module.graph.nodes if n.op == "output")
    output.args = ([*output.args[0], whole],)
    narrow_products(module.graph)
    assert widths(module.graph) == 5
