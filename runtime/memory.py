"""Bytes that are really live: every storage the runtime makes is counted from birth until the last reference to it is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from adjcomp.runtime.mesh.sharded import local_part


class StorageTracker:
    """Counts storages by identity. `base_bytes` is what was live before (parameters, gradients, inputs, optimizer state)."""

    def __init__(self, base_bytes: int) -> None:
        self.live_bytes = base_bytes
        self.peak_bytes = base_bytes
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor that was just made."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        reference = weakref.ref(storage, self._gone)
        self._known[id(reference)] = (reference, size)
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def track_all(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count several, skipping results that do not exist."""
        for tensor in tensors:
            if tensor is not None:
                self.track(tensor)

    def _gone(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.live_bytes -= self._known.pop(id(reference))[1]


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once; of a DTensor, of its local part."""
    found: dict[int, int] = {}
    for tensor in map(local_part, tensors):
        if tensor.device.type == "meta":
            found[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            found[storage.data_ptr() or -id(tensor)] = storage.nbytes()
    return sum(found.values())
