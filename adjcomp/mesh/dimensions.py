"""What a DeviceMesh asks for: the names of its dimensions say what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from adjcomp.options import Options

KNOWN = ("data", "layers", "time", "auto")
SPREADING = ("layers", "time", "auto")  # dimensions over which one step is spread


@dataclass(frozen=True)
class Layout:
    """A mesh as one rank sees it.

    placement: how a step is spread over `ranks`: "layers", "time", "grid", or None where the planner decides. shape: ranks along
        "layers" and along "time", where the mesh has both. ranks: global ranks that share one step, in the plan's order; this
        rank alone where the mesh has "data" only. replicas: global ranks that have this rank's part of the same plan on other
        data; empty without a "data" dimension.
    """

    placement: str | None
    shape: tuple[int, int] | None
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    spread_group: Any  # process group of `ranks`; None where this rank is alone
    data_group: Any  # process group of `replicas`; None without any


def read_mesh(mesh: object, options: Options, device: torch.device) -> Layout:
    """The layout of a mesh.

    Raises:
        TypeError: `mesh` is no DeviceMesh. ValueError: its dimensions have no names, unknown or contradictory ones, this rank is
        no part of it, it is a mesh of other devices than the model's, or the options contradict it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}: use init_device_mesh(…, mesh_dim_names=…)")
    names = _names(mesh)
    spreading = tuple(name for name in names if name in SPREADING)
    if "auto" in spreading and len(spreading) > 1:
        raise ValueError(
            f"a mesh with the dimension 'auto' can't have {' and '.join(name for name in spreading if name != 'auto')} too: the "
            "planner decides about all ranks of 'auto'; name both 'layers' and 'time', or put further ranks into 'data'"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is no part of the mesh {tuple(mesh.mesh.shape)}")
    if mesh.device_type != device.type:
        raise ValueError(f"the mesh is of {mesh.device_type} devices and the model is on {device}")
    placement = _placement(spreading)
    _check_options(placement, bool(spreading), options)
    data = mesh.get_group("data") if "data" in names else None
    replicas = tuple(dist.get_process_group_ranks(data)) if data is not None else ()
    ranks, shape = _spread_ranks(mesh, names)
    group = _group(mesh, spreading, ranks)
    return Layout(placement or options.placement, shape, ranks, replicas, group, data)


def _placement(spreading: tuple[str, ...]) -> str | None:
    """What the spreading dimensions of a mesh ask for."""
    if len(spreading) > 1:
        return "grid"
    return None if not spreading or spreading[0] == "auto" else spreading[0]


def _spread_ranks(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """The ranks that share this rank's step, those of one stage next to each other; and the shape of a grid."""
    here = mesh.get_coordinate()
    index = tuple(here[i] if name == "data" else slice(None) for i, name in enumerate(names))  # type: ignore[index]
    own = mesh.mesh[index]
    order = [name for name in names if name != "data"]
    if len(order) < 2:
        return tuple(int(rank) for rank in own.flatten()), None
    stages = own if order == ["layers", "time"] else own.T
    return tuple(int(rank) for rank in stages.flatten()), (int(stages.shape[0]), int(stages.shape[1]))


def _group(mesh: DeviceMesh, spreading: tuple[str, ...], ranks: tuple[int, ...]) -> Any:
    """The process group of the ranks that share a step; None where this rank is alone."""
    if len(spreading) > 1:
        return dist.new_group(sorted(ranks), use_local_synchronization=True)
    return mesh.get_group(spreading[0]) if spreading else None


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(f"the dimensions of the mesh need names that say what they do: {', '.join(KNOWN)}")
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise ValueError(f"unknown mesh dimension {unknown[0]!r}; known: {', '.join(KNOWN)}")
    return tuple(names)


def _check_options(placement: str | None, spread: bool, options: Options) -> None:
    if options.placement is not None and not spread:
        raise ValueError(f"Options(placement={options.placement!r}) on a mesh without a dimension to spread a step over")
    if placement is not None and options.placement not in (None, placement):
        dimensions = "dimensions 'layers' and 'time'" if placement == "grid" else f"dimension {placement!r}"
        raise ValueError(f"Options(placement={options.placement!r}) contradicts the mesh {dimensions}")
