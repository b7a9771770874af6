"""What ranks do in the tests of approximate gradients: compiled on a mesh, against the paper's sums on one process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mesh_work
import paper_oracles
import torch
import torch.distributed as dist
from generated import Mixer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import adjcomp
from adjcomp.ir.transfers import Send
from adjcomp.ir.values import Kind

WIDTH = 4


@dataclass(frozen=True)
class Form:
    """One comparison: the mixers of a stack, the gradient that is wanted, and the call."""

    kinds: tuple[str, ...]
    dimension: str
    coupling: str = "exact"
    window: int | None = None
    length: int = 14
    batch: int = 2
    chunk: int = 3


@dataclass(frozen=True)
class Found:
    """What a rank found. distance: as `mesh_work.Row` has it. returned: layers whose g this rank handed to others. adjoints:
    bytes of adjoint states that it handed on.
    """

    distance: float
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    sent: tuple[int, int]
    returned: tuple[int, ...]
    adjoints: int


class Dense(nn.Module):
    """A mixer with a full transition matrix a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.A, self.b = nn.Linear(width, width * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        A = torch.tanh(self.A(x).unflatten(-1, (x.shape[-1], x.shape[-1]))) * 0.4
        return adjcomp.ops.dense_scan(A, self.b(x))[0]


class Block(nn.Module):
    """x + branch(x). `constant`: the branch reads x as a constant, as residual coupling says."""

    constant = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixer = Dense(WIDTH) if kind == "dense" else Mixer(kind, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mixer(self.norm(x.detach() if self.constant else x)))


class Stack(nn.Module):
    """Embedding, blocks, logits."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Block(kind) for kind in kinds)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def against_oracles(rank: int, forms: tuple[Form, ...]) -> list[Found]:
    """Each form's gradients against autograd's of the sums as they are written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", adjcomp.ApproximationWarning)
        return [_compare(form) for form in forms]


def _compare(form: Form) -> Found:
    torch.manual_seed(0)
    model = Stack(form.kinds).double()
    ids = torch.randint(0, 11, (form.batch, form.length), generator=torch.Generator().manual_seed(1))
    with _literal(form):
        model(ids).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(form.dimension,))
    options = adjcomp.Options(collective_timeout_seconds=60.0)
    compiled = adjcomp.compile(
        model, mesh=mesh, chunk=form.chunk, coupling=form.coupling, adjoint_window=form.window, options=options
    )
    compiled(ids).square().sum().backward()
    found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    plan, own = compiled.plan, dist.get_rank()
    sends = [action.value for action in plan.actions if isinstance(action, Send) and action.device == own]
    adjoints = [value for value in sends if value.kind is Kind.ADJOINT]
    return Found(
        mesh_work.distance_of(found, wanted),
        tuple(found),
        tuple(wanted),
        (compiled.stats.sent_bytes, mesh_work.planned_sends(plan, own)),
        tuple(sorted({value.layer for value in sends if value.kind is Kind.COTANGENT})),
        sum(plan.costs.tile(value.layer, value.chunk).adjoint_bytes for value in adjoints),
    )


@contextlib.contextmanager
def _literal(form: Form) -> Iterator[None]:
    """The model as the form's gradient has it: states rebuilt inside of the window, branches of constants."""
    with contextlib.ExitStack() as stack:
        if form.window is not None:
            for name, op in paper_oracles.OPS.items():
                stack.enter_context(mock.patch.object(adjcomp.ops, name, _windowed(op, form.window)))
        stack.enter_context(mock.patch.object(Block, "constant", form.coupling == "residual"))
        yield


def _windowed(op: Callable[..., Any], window: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: op(window, *args, **kwargs)
