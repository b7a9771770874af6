"""Root-mean-square norms in models become one op, in every way they are written; others are left alone."""

from __future__ import annotations

import pytest
import torch
from fidelity import compare
from torch import Tensor, nn

import adjcomp
from adjcomp.passes.pipeline import run_capture


class Norm(nn.Module):
    """x / rms(x), in one of the ways of the field."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.kind}")(x)

    def _mamba(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32) if x.dtype is torch.bfloat16 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)

    def _weightless(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def _gemma(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    def _torch(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)

    def _half(self, x: Tensor) -> Tensor:  # over half of the channels: no such norm
        return x * torch.rsqrt(x[..., ::2].square().mean(-1, keepdim=True) + 1e-6)


class Stack(nn.Module):
    def __init__(self, kind: str, width: int = 6) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(kind, width) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            u = norm(x)
            h, _ = adjcomp.ops.linear_scan(torch.sigmoid(u), linear(u))
            x = x + h
        return x.square().mean()


KINDS = ("mamba", "weightless", "gemma", "torch", "half")


def targets(model: nn.Module, x: Tensor) -> list[str]:
    captured = run_capture(model, (x,), {})
    return [str(n.target) for joint in captured.joints if joint for n in joint.graph.nodes]


@pytest.mark.parametrize(("kind", "fused"), [(kind, kind != "half") for kind in KINDS])
def test_every_way_to_write_it(kind: str, fused: bool) -> None:
    model, x = Stack(kind).double(), torch.randn(2, 17, 6, dtype=torch.float64)
    names = targets(model, x)
    assert ("adjcomp.rms_norm.default" in names) is fused
    assert ("aten.rsqrt.default" in names) is not fused
    compare(model, adjcomp.compile(model, chunk=5), lambda m: m(x), 1e-10)


def test_in_lower_precision() -> None:
    """As far from the float32 gradients as plain autograd in bfloat16."""
    model, x = Stack("mamba").bfloat16(), torch.randn(2, 40, 6).bfloat16()
    assert "adjcomp.rms_norm.default" in targets(model, x)
    exact = Stack("mamba")
    exact.load_state_dict(model.state_dict())
    errors = []
    for run in (model, adjcomp.compile(model, chunk=7)):
        model.zero_grad()
        run(x).backward()
        exact.zero_grad()
        exact(x.float()).backward()
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(sum((p.grad.float() - q.grad).norm() ** 2 for p, q in pairs) ** 0.5)
    assert errors[1] <= 1.5 * errors[0]


def test_the_cotangent_of_the_residual_stream_joins_in_the_op() -> None:
    joints = run_capture(Stack("mamba"), (torch.randn(1, 9, 6),), {}).joints
    joint = [j for j in joints if j and "rms_norm_vjp" in str(j.graph)][-1]  # below the first layer nothing wants a cotangent
    vjp = next(n for n in joint.graph.nodes if n.target is torch.ops.adjcomp.rms_norm_vjp.default)
    assert vjp.args[1] is not None
