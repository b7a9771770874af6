"""The words that reports use for what is live."""

from __future__ import annotations

from collections.abc import Mapping

from adjcomp.ir.values import Kind

# A residual chunk that stays is there for a VJP or a second run, so it counts as an internal.
KIND_NAMES: dict[Kind, str] = {
    Kind.CARRY: "borders",
    Kind.NARROW: "borders",
    Kind.STREAM: "internals",
    Kind.KEEP: "internals",
    Kind.COTANGENT: "cotangents",
    Kind.ADJOINT: "adjoint states",
    Kind.HALO: "borders",
    Kind.SUMMARY: "borders",
    Kind.ADJOINT_SUMMARY: "adjoint states",
    Kind.HALO_ADJOINT: "adjoint states",
}
ALWAYS = ("parameters", "optimizer", "gradients", "borders", "internals", "workspace")  # named even when they are zero


def by_kind(resident: Mapping[str, int], turn: Mapping[str, int], live: Mapping[Kind, int], workspace: int) -> dict[str, int]:
    """Bytes by the words of reports; `live` has the bytes of values by their kind."""
    found = dict.fromkeys(ALWAYS, 0)
    for kinds in (resident, turn):
        for name, size in kinds.items():
            found[name] = found.get(name, 0) + size
    for kind, name in KIND_NAMES.items():
        if live[kind] or name in ALWAYS:
            found[name] = found.get(name, 0) + live[kind]
    found["workspace"] += workspace
    return found
