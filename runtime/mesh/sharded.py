"""Parameters of which every rank has some rows (DTensors, as `fully_shard` makes them): their parts, and their wholes for a step.

A parameter of n rows on g ranks is cut into g parts of ⌈n / g⌉ rows, the last ones shorter or empty, as `torch.chunk` cuts it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Nobody has one before torch's module of them is imported, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What is here of a tensor: the local part of a DTensor, any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


@dataclass(frozen=True)
class Sharding:
    """How a parameter's rows are shared out. dimension: of its DeviceMesh; ranks: global, in the order of the parts."""

    dimension: int
    ranks: tuple[int, ...]
    group: Any  # process group of `ranks`
    place: int  # this rank among them
    rows: int  # of a part
    shape: tuple[int, ...]  # of the whole

    def room(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for all parts, one after the other: the whole, and what the last parts lack."""
        return torch.empty((self.rows * len(self.ranks), *self.shape[1:]), dtype=dtype, device=device)

    def room_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of that room."""
        return self.rows * len(self.ranks) * math.prod(self.shape[1:]) * dtype.itemsize

    def padded(self, part: Tensor) -> Tensor:
        """A part of full length."""
        if part.shape[0] == self.rows:
            return part.contiguous()
        made = part.new_zeros((self.rows, *self.shape[1:]))
        made[: part.shape[0]] = part
        return made

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor like the whole parameter, with memory of its own."""
        start = min(self.place * self.rows, self.shape[0])
        return whole[start : min(start + self.rows, self.shape[0])].clone()


def sharding_of(name: str, parameter: Tensor) -> Sharding:
    """How a DTensor is shared out. ValueError for another way than by rows over one dimension of its mesh."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(placements[cut[0]]).__name__ != "Shard" or placements[cut[0]].dim != 0:
        raise ValueError(
            f"{name} is sharded as {placements}: a compiled model takes parameters that fully_shard has cut along their first "
            "dimension, over one dimension of a mesh (replicated over others)"
        )
    group = mesh.get_group(cut[0])
    ranks = tuple(dist.get_process_group_ranks(group))
    rows = -(-int(parameter.shape[0]) // len(ranks))
    return Sharding(cut[0], ranks, group, mesh.get_local_rank(cut[0]), rows, tuple(parameter.shape))


def like_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of a sharded parameter, made of this rank's rows of it."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    made: Tensor = DTensor.from_local(
        part.to(parameter.dtype), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return made


def shardings_of(parameters: Mapping[str, Tensor]) -> dict[str, Sharding]:
    """Those of the sharded ones among some parameters. ValueError: see `sharding_of`."""
    return {name: sharding_of(name, parameter) for name, parameter in parameters.items() if is_sharded(parameter)}


def part_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of the parts that are here."""
    return sum(part.numel() * part.element_size() for part in map(local_part, parameters))
