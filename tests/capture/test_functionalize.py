"""In-place operations of a traced graph: their functional form gives what the program gives, and leaves its inputs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from adjcomp import CaptureError
from adjcomp.passes.functionalize import Functional, functionalize
from adjcomp.passes.writes import mutates


def relu_of_a_slice(x: Tensor, y: Tensor) -> Tensor:
    base = x + 0
    base[:].relu_()
    return base * y


def arithmetic(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).add_(y, alpha=3).mul_(y).sub_(1).clamp_(min=-1)


def writes_to_parts(x: Tensor, y: Tensor) -> Tensor:
    base = x.clone()
    base[:, 1] = y[:, 0]
    base[:, 2:] += 1
    base[0] *= y[1]
    return base


def writes_through_views(x: Tensor, y: Tensor) -> Tensor:
    base = x.clone()
    base.transpose(0, 1)[1].add_(5)
    base.view(-1)[:3].zero_()
    base.unsqueeze(0).permute(2, 0, 1)[3].fill_(2)
    return base


def view_read_after_a_write_to_its_base(x: Tensor, y: Tensor) -> Tensor:
    base = x * 1
    view = base[:, :2]
    base.mul_(y)
    view.add_(1)
    return torch.cat([base, view], 1)


def masks(x: Tensor, y: Tensor) -> Tensor:
    base = x + y
    base[base > 0.5] = 0.25
    base[y < 0] = base.mean()
    return base.masked_fill_(x > 1, 3.0)


def keeps_its_dtype(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(2, 4, dtype=torch.float32).add_(x).copy_(y[0]).mul_(2)


def returns_of_in_place_calls_are_views(x: Tensor, y: Tensor) -> Tensor:
    base = x + 1
    same = base.mul_(2)
    base.add_(1)
    return same + base


PROGRAMS = [
    relu_of_a_slice,
    arithmetic,
    writes_to_parts,
    writes_through_views,
    view_read_after_a_write_to_its_base,
    masks,
    keeps_its_dtype,
    returns_of_in_place_calls_are_views,
]


def functional_form(
    program: Callable[..., Tensor], *inputs: Tensor, parameters: frozenset[str] = frozenset()
) -> tuple[Functional, Callable[..., tuple[Tensor, ...]]]:
    """The functional form of a program, and what runs it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(lambda *args: [program(*args)])(*(mode.from_tensor(t) for t in inputs))
    found = functionalize(traced.graph, tuple("xyz"[: len(inputs)]), parameters, frozenset())
    return found, fx.Interpreter(fx.GraphModule(traced, found.graph)).run


@pytest.mark.parametrize("program", PROGRAMS)
def test_functional_form_gives_what_the_program_gives(program: Callable[..., Tensor]) -> None:
    x, y = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    found, run = functional_form(program, x, y)
    assert not any(mutates(node) for node in found.graph.nodes)
    (got,) = run(x, y)
    torch.testing.assert_close(got, program(x.clone(), y.clone()), rtol=0, atol=0)
    assert found.updated == ()


def test_changed_inputs_come_out_as_further_outputs() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y[0].add_(1)
        return x * y

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    found, run = functional_form(program, x, y)
    got, last = run(x, y)
    changed = y.clone()
    torch.testing.assert_close(got, program(x, changed))
    torch.testing.assert_close(last, changed)
    assert found.updated == ("y",)


def test_a_changed_parameter_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"add_.*changes the parameter 'y'"):
        functional_form(lambda x, y: x * y.add_(1), torch.randn(3), torch.randn(3), parameters=frozenset({"y"}))


def test_an_operation_without_a_functional_form_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"native_batch_norm_legit.*running_mean"):
        functional_form(
            lambda x, y, z: torch.ops.aten._native_batch_norm_legit(x, None, None, y, z, True, 0.1, 1e-5)[0],
            torch.randn(4, 3),
            torch.zeros(3),
            torch.ones(3),
        )
