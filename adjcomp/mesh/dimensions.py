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

    placement: how a step is spread over `ranks`: "layers", "time", or None where the planner decides. ranks: global ranks that
        share one step, in the plan's order; this rank alone where the mesh has "data" only. replicas: global ranks that have
        this rank's part of the same plan on other data; empty without a "data" dimension.
    """

    placement: str | None
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
    spreading = [name for name in names if name in SPREADING]
    if len(spreading) > 1:
        raise ValueError(
            f"a mesh has one of the dimensions {', '.join(SPREADING)}, not {' and '.join(spreading)}: spread a step over layers "
            "or over time, and put further ranks into a 'data' dimension"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is no part of the mesh {tuple(mesh.mesh.shape)}")
    if mesh.device_type != device.type:
        raise ValueError(f"the mesh is of {mesh.device_type} devices and the model is on {device}")
    placement = None if not spreading or spreading[0] == "auto" else spreading[0]
    _check_options(placement, bool(spreading), options)
    group = mesh.get_group(spreading[0]) if spreading else None
    data = mesh.get_group("data") if "data" in names else None
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (dist.get_rank(),)
    replicas = tuple(dist.get_process_group_ranks(data)) if data is not None else ()
    return Layout(placement or options.placement, ranks, replicas, group, data)


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
        raise ValueError(f"Options(placement={options.placement!r}) contradicts the mesh dimension {placement!r}")
