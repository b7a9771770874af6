"""A hybrid stack for tests: attention layers beside a recurrence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fidelity import Block, Gradients, Residual, distance, measure, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import adjcomp


class Attention(nn.Module):
    """x + attention of norm(x) with `groups` heads of keys for `heads` of queries, rotated by absolute positions."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, groups * self.size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.3 ** torch.arange(self.size, dtype=x.dtype)
        q, k, v = (
            project(y).view(*x.shape[:2], n, self.size).transpose(1, 2)
            for project, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = q * angle.cos(), k * angle.cos()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def hybrid(width: int = 8, heads: int = 4, groups: int = 2) -> Residual:
    """A recurrence and two attention layers, float64."""
    torch.manual_seed(0)
    blocks = [Attention(width, heads, groups), Block(width), Attention(width, heads, groups)]
    return Residual(blocks, width).double()


def on_a_mesh(rank: int, dimension: str) -> tuple[float, int, int]:
    """Of a step on all ranks: how far gradients are from plain's, and the predicted and the measured peak of this rank."""
    model, ids = hybrid(), tokens(1, 24, vocab=31)
    want = measure(model, lambda: model(ids).pow(2).sum())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(dimension,))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=5, options=adjcomp.Options(collective_timeout_seconds=60.0))
    compiled(ids).pow(2).sum().backward()
    here = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    known = {name: grad for name, grad in want.grads.items() if name in here}
    assert known
    got, part = Gradients(want.loss, {name: here[name] for name in known}), Gradients(want.loss, known)
    stats = compiled.stats
    return distance(got, part), stats.predicted_peak_bytes, stats.measured_peak_bytes
