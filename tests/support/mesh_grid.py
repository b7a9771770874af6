"""What ranks do in the tests of grids: meshes with "layers" and "time"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fidelity import mamba, mamba2, tokens
from generated import BlockSpec, StackSpec, build
from mesh_work import device_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import adjcomp
from adjcomp import distributed

OPTIONS = adjcomp.Options(collective_timeout_seconds=60.0)
LENGTH = 13


class DenseState(nn.Module):
    """A user's model: three residual layers whose state is moved by a matrix that depends on the token."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.width = width
        self.inside = nn.Embedding(61, width)
        self.moves = nn.ModuleList(nn.Linear(width, width * width) for _ in range(3))
        self.outside = nn.Linear(width, 61)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inside(input_ids)
        for move in self.moves:
            matrices = 0.3 * move(x).tanh().unflatten(-1, (self.width, self.width))
            x = x + adjcomp.ops.dense_scan(matrices, x)[0]
        return nn.functional.cross_entropy(self.outside(x).flatten(0, 1), labels.flatten())


def model_of(name: str) -> nn.Module:
    """One of the models, float32."""
    torch.manual_seed(0)
    return {"mamba": mamba, "mamba2": mamba2, "dense": DenseState}[name]()


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    found: Any = model(input_ids=ids, labels=ids)
    return found if isinstance(found, Tensor) else found.loss


def family(rank: int, name: str, batch: int, length: int, shape: tuple[int, int]) -> tuple[float, float, int]:
    """Worst distance of this rank's gradients to plain autograd's, that of the loss, and how many parameters got one."""
    model, ids = model_of(name), tokens(batch, length)
    plain = _loss(model, ids)
    plain.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("layers", "time"))
    try:
        _loss(adjcomp.compile(model, 64, mesh=mesh, chunk=7, options=OPTIONS), ids)
    except adjcomp.BudgetError as error:
        budget = error.minimum_bytes
    compiled = adjcomp.compile(model, budget, mesh=mesh, chunk=7, options=OPTIONS)
    loss = _loss(compiled, ids)
    loss.backward()
    whole = 1e-3 * sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    worst = max(float((g - wanted[n]).norm() / (wanted[n].norm() + whole)) for n, g in found.items())
    return worst, abs(loss.item() - plain.item()), len(found)


def reads_its_tokens(rank: int) -> tuple[list[tuple[int, int]], float, float]:
    """The ranges of this rank, and its losses with all tokens and with its own only."""
    ids = tokens(2, LENGTH, vocab=11)
    model = build(StackSpec((BlockSpec("selective"), BlockSpec("conv")), loss="shifted"))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("layers", "time"))
    compiled = adjcomp.compile(model, mesh=mesh, chunk=3, options=OPTIONS)
    spans = distributed.token_ranges(compiled, example_inputs=(ids, ids), seq_len=LENGTH)
    hull = distributed.token_range(compiled, example_inputs=(ids, ids), seq_len=LENGTH)
    assert (hull.start, hull.stop) == (spans[0].start, spans[-1].stop)
    own = distributed.read_tokens(ids, spans)
    return [(span.start, span.stop) for span in spans], compiled(ids, ids).item(), compiled(own, own).item()


def beside_data(rank: int, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """This rank's device in plans on a mesh, the ranks of its plan, and what a mesh with "auto" besides says."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    compiled = adjcomp.compile(nn.Linear(2, 2), mesh=mesh, options=OPTIONS)
    ranks = distributed._session(compiled)[1].layout.ranks
    wrong = init_device_mesh("cpu", shape, mesh_dim_names=tuple("auto" if name == "time" else name for name in names))
    try:
        adjcomp.compile(nn.Linear(2, 2), mesh=wrong, options=OPTIONS)
    except ValueError as error:
        return device_of(compiled), ranks, str(error)
    return device_of(compiled), ranks, ""
