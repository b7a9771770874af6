"""Ops under fake tensors and make_fx: one node for the forward, one for the VJP, and nothing learnt about a symbolic time."""

from __future__ import annotations

import pytest
import torch
from op_cases import SMALL, Case
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from adjcomp import ops


def trace_step(case: Case, steps: int) -> tuple[GraphModule, ShapeEnv]:
    """Trace outputs and gradients, with time as one symbol that all arguments share."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    args = {}
    for name, t in case.given().items():
        timed = name in case.timed
        sizes = [DimDynamic.DUCK if timed and i == 1 else DimDynamic.STATIC for i in range(t.dim())]
        args[name] = mode.from_tensor(
            t.float() if not t.is_complex() else t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )
    names = list(args)

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = case.op(**dict(zip(names, leaves, strict=True)), **case.options)
        return (*out, *torch.autograd.grad([*out], leaves, [torch.ones_like(o) for o in out]))

    with mode, enable_python_dispatcher():
        return make_fx(step)(*args.values()), env


@pytest.mark.parametrize("steps", [2, 7, 31, 32, 33, 64, 1031])
@pytest.mark.parametrize("name", SMALL)
def test_time_stays_symbolic(name: str, steps: int) -> None:
    case = SMALL[name](steps)
    graph, env = trace_step(case, steps)
    assert not env.replacements
    assert not env.guards
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "adjcomp" in str(n.target)]
    assert targets == [f"adjcomp.{case.name}.default", f"adjcomp.{case.name}_vjp.default"]


@pytest.mark.parametrize("name", SMALL)
def test_a_trace_runs_at_another_length(name: str) -> None:
    graph, _ = trace_step(SMALL[name](31), 31)
    case = SMALL[name](45)
    args = [t.float() if not t.is_complex() else t for t in case.given().values()]
    leaves = [t.clone().requires_grad_() for t in args]
    out = case.op(**dict(zip(case.given(), leaves, strict=True)), **case.options)
    want = [*out, *torch.autograd.grad([*out], leaves, [torch.ones_like(o) for o in out])]
    for p, q in zip(graph(*args), want, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", SMALL)
def test_fake_kernels_agree_with_real_ones(name: str) -> None:
    case = SMALL[name](40)
    leaves = [t.float().requires_grad_() if not t.is_complex() else t.requires_grad_() for t in case.given().values()]
    names = list(case.given())

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = case.op(**dict(zip(names, tensors, strict=True)), **case.options)
        return [*out, *torch.autograd.grad([o.abs().sum() for o in out], tensors)]

    real = step(*leaves)
    mode = FakeTensorMode()
    fake = step(*[mode.from_tensor(t).detach().requires_grad_() for t in leaves])
    for p, q in zip(real, fake, strict=True):
        assert (p.shape, p.stride(), p.dtype) == (q.shape, q.stride(), q.dtype)


def test_meta_tensors_work() -> None:
    x = torch.empty(1, 8, 4, device="meta", requires_grad=True)
    h, last = ops.linear_scan(x, x)
    assert (h.shape, last.shape) == ((1, 8, 4), (1, 4))


@pytest.mark.parametrize("name", SMALL)
def test_a_second_derivative_is_refused(name: str) -> None:
    case = SMALL[name](4)
    leaves = [t.requires_grad_() for t in case.given().values()]
    out, _ = case.op(**dict(zip(case.given(), leaves, strict=True)), **case.options)
    first = torch.autograd.grad(out.abs().square().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"{case.name} has no second derivative"):
        torch.autograd.grad(first.abs().sum(), leaves[0])
