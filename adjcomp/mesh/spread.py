"""The other ranks of a compiled model: joining them, agreeing with them, sharing a plan and the parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adjcomp.ir.executable import Executable
from adjcomp.ir.plan import Plan
from adjcomp.mesh.agreement import agreed
from adjcomp.mesh.dimensions import Layout, read_mesh
from adjcomp.mesh.elsewhere import send_away
from adjcomp.mesh.ownership import around, everywhere, layers_by_rank, let_go, needed_names, ranges_of
from adjcomp.mesh.planning import share_plan
from adjcomp.mesh.sharding import refuse_layers, take_over, without_hooks
from adjcomp.options import Options
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.mesh.exchange import Exchange
from adjcomp.runtime.mesh.link import Circle, Link, Traffic
from adjcomp.runtime.mesh.part import Part
from adjcomp.runtime.mesh.sharded import Sharding
from adjcomp.runtime.mesh.watch import Watch

T = TypeVar("T")
WHAT_TO_DO = (
    "Under a mesh of layers, steps and losses run through the compiled model. For a plain forward, generation or a copy, save "
    "adjcomp.distributed.local_state() of every rank with torch.distributed.checkpoint and load that into a whole model"
)
_JOINED = itertools.count()  # compiled models on meshes in this process; equal on all ranks, as compile() is called by all


@dataclass
class Spread:
    """A compiled model's place among the ranks of a mesh.

    shardings: of parameters that ranks have in parts. foreign: parameters and buffers that other ranks have; empty until a plan
        by layers has run. shapes: meta tensors of the size and layout of both, by name.
    """

    layout: Layout
    link: Link
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    shapes: dict[str, torch.Tensor] = field(default_factory=dict)
    homes: tuple[frozenset[str], ...] | None = None  # by device: names that are there; None before the first step
    owned: tuple[tuple[int, int] | None, ...] | None = None  # by stage: first and last layer, where each has its own
    _parts: dict[int, Part] = field(default_factory=dict)

    @property
    def place(self) -> int:
        """This rank's device in its plans."""
        return self.link.place

    def understand(self, make: Callable[[], T], facts: Callable[[T], str], flag: Callable[[T], bool]) -> tuple[T, bool]:
        """What `make` returns, if all ranks understand the same call; and whether any rank raised its flag."""
        return agreed(self.link, "what they are called with", make, facts, flag)

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The first rank's plan; its error is raised on all ranks."""
        return share_plan(self.link, make)

    def begin(self, executable: Executable, seed: int, tracker: StorageTracker, state: Mapping[str, torch.Tensor]) -> Exchange:
        """The exchange of a step, once all ranks have the same plan and the same random numbers. RankError where they don't."""
        part = self._part(executable)
        facts = f"plan {part.digest}\nseed {seed}"
        agreed(self.link, "their plan or their seed (torch.manual_seed)", lambda: None, lambda _: facts, lambda _: False)
        self.link.prepare(part.sets)
        self.link.traffic = Traffic()
        return Exchange(part, self.link, tracker, self.shardings, {name: state[name] for name in self.shardings})

    def settle(self, executable: Executable, model: torch.nn.Module) -> None:
        """Let go of parameters and buffers that only other ranks need.

        Raises:
            ValueError: on all ranks, where an earlier plan has put elsewhere what this one needs.
        """
        state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        everything, devices = frozenset(state), range(len(self.layout.ranks))
        replicated = self._part(executable).replicated
        needs = tuple(everything if replicated else needed_names(executable, device) for device in devices)
        if self.homes is None:
            self.homes, self.foreign = needs, frozenset(everything - needs[self.place])
            self.owned = None if replicated else ranges_of(executable, self.layout.shape or (len(devices), 1))
            self._part_with(executable, {name: state[name] for name in sorted(self.foreign)})
        for rank, needed, home in zip(self.layout.ranks, needs, self.homes, strict=True):
            if missing := sorted(needed - home):
                raise ValueError(
                    f"the plan of this shape needs {missing[0]} on rank {rank}, but the first plan has put it on another: layers "
                    "stay where they are. Compile the model anew for this plan"
                )

    def _part_with(self, executable: Executable, tensors: Mapping[str, torch.Tensor]) -> None:
        """Free the memory of tensors that other ranks have, and let them say so."""
        assert self.homes is not None
        for name, tensor in tensors.items():
            self.shapes[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        let_go(tensors.values())
        layers = layers_by_rank(executable, self.layout.ranks)
        for name, tensor in tensors.items():
            owners = [str(rank) for rank, home in zip(self.layout.ranks, self.homes, strict=True) if name in home]
            where = f"on rank {' and '.join(owners)}" if owners else "on no rank"
            send_away(tensor, f"{name} is {where}, not on rank {self.link.watch.own}: {layers}. {WHAT_TO_DO}")

    def check_whole(self, model: torch.nn.Module) -> None:
        """RuntimeError where parameters of the model are on other ranks: its plain forward can't run."""
        state: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if self.foreign:
            raise RuntimeError(state[min(self.foreign)].elsewhere)

    @contextmanager
    def reading(self, model: torch.nn.Module) -> Iterator[None]:
        """While it lasts, stand-ins of parameters elsewhere are tensors as any: shapes are read of them, and nothing computed.
        Hooks that would gather a module's parameters are off.
        """
        with (
            torch._C.DisableTorchFunctionSubclass() if self.foreign else nullcontext(),
            without_hooks(model) if self.shardings else nullcontext(),
        ):
            yield

    def check_sides(self, executable: Executable) -> None:
        """ValueError where what surrounds the layers reads a parameter that is in parts: only tiles read wholes."""
        read = sorted(around(executable.stack) & self.shardings.keys())
        if read:
            raise ValueError(f"{read[0]} is read outside of all layers, and can't be sharded: leave it away from fully_shard")

    def local(self, names: Iterable[str]) -> list[str]:
        """Those of some parameters and buffers that are here."""
        return [name for name in names if name not in self.foreign]

    def _part(self, executable: Executable) -> Part:
        key = id(executable)
        if key not in self._parts or self._parts[key].executable is not executable:
            replicated = self.layout.placement == "time" or everywhere(executable)
            self._parts[key] = Part(executable, self.place, replicated)
        return self._parts[key]


def join(mesh: object, options: Options, device: torch.device, model: torch.nn.Module) -> Spread:
    """Come together with the other ranks of a mesh to run `model`; every rank of it calls this.

    Raises:
        TypeError, ValueError: see `read_mesh`; parameters are sharded otherwise than by `fully_shard` over time or data.
        RankError: a rank doesn't come.
    """
    from torch.distributed.distributed_c10d import _get_default_store  # missing where torch was built without distributed

    layout = read_mesh(mesh, options, device)
    own = dist.get_rank()
    everyone = sorted(int(rank) for rank in mesh.mesh.flatten())  # type: ignore[attr-defined]
    shardings = take_over(model, tuple(everyone))
    if shardings and len(layout.ranks) > 1:
        if layout.placement in ("layers", "grid"):
            refuse_layers(shardings)
        layout = replace(layout, placement="time")
    watch = Watch(_get_default_store(), everyone, own, options.collective_timeout_seconds, f"{next(_JOINED)}/{everyone}")
    circle = _circle("plan", layout.ranks, layout.spread_group, device)
    replicas = _circle("data", layout.replicas, layout.data_group, device) if len(layout.replicas) > 1 else None
    link = Link(circle, replicas, _ways(circle, device), watch, device)
    made = Spread(layout, link, shardings)
    for name, parameter in model.named_parameters():
        if name in shardings:
            made.shapes[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    weakref.finalize(made, _leave, watch, link)
    return made


def _circle(name: str, ranks: tuple[int, ...], group: object, device: torch.device) -> Circle:
    control = group
    if device.type != "cpu" and len(ranks) > 1:
        control = dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)
    return Circle(f"{name} {min(ranks)}", ranks, group, control)


def _ways(circle: Circle, device: torch.device) -> tuple[Any, Any]:
    """The groups for transfers up and down; on a CPU, where threads wait for each transfer, one serves for both."""
    if device.type == "cpu" or len(circle.ranks) == 1:
        return circle.tensors, circle.tensors
    up, down = (dist.new_group(sorted(circle.ranks), use_local_synchronization=True) for _ in range(2))
    return up, down


def _leave(watch: Watch, link: Link) -> None:
    link.close()
    watch.close()
