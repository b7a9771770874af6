"""Values that wait in pinned host memory: copies to it and back, beside the computations.

On an accelerator each direction has a stream of its own. A copy out waits for the computation that made the value; the value's
device memory is given back only once the computing stream has waited for the copy, so no other work can write into it before. A
copy in waits for what used its memory before, and the first computation that reads the value waits for the copy. A place on the
host that a value has left serves the next value of the same layer, which is written once that copy in has ended. On a CPU, device
and host are one memory, and the copies are plain ones.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable

import torch

from adjcomp.ir.actions import Action
from adjcomp.ir.costs import StackCosts
from adjcomp.ir.stack import ResidualStack
from adjcomp.ir.transfers import Fetch, Offload
from adjcomp.ir.values import Value
from adjcomp.runtime.memory import StorageTracker
from adjcomp.runtime.values import Held, Tensor

ALIGNMENT = 256  # bytes
Place = list[Tensor | None]  # host memory of a value's tensors
_FREE: dict[str, list[Tensor]] = {}  # slabs that no step uses, by device: registering memory takes longer than a step should
_STREAMS: dict[str, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # out and in, by device


class HostCopies:
    """What one step has on the host."""

    def __init__(self, costs: StackCosts, tracker: StorageTracker, device: torch.device, size: int) -> None:
        """size: bytes of everything that the step offloads, see `offloaded_bytes`."""
        self.costs, self.tracker, self.device = costs, tracker, device
        self.streams = _streams(device)
        self.slab = _borrow(device, size)
        self.used = 0
        self.stored: dict[Value, Place] = {}
        self.left: dict[int, list[tuple[Place, torch.cuda.Event | None]]] = {}  # by layer; each with the copy that is its last
        self.leaving: dict[Value, torch.cuda.Event] = {}  # copies out that the computing stream hasn't waited for
        self.coming: dict[Value, torch.cuda.Event] = {}  # copies in that it hasn't waited for
        if self.streams is not None:
            # a step that failed may have left copies under way, from this memory and to what it had on the device
            self.streams[0].wait_stream(self.streams[1])
            torch.cuda.current_stream(device).wait_stream(self.streams[1])
        weakref.finalize(self, _FREE[str(device)].append, self.slab)

    def offload(self, value: Value, held: Held) -> None:
        """Start to copy a value to the host."""
        left = self.left.get(value.layer)
        places, emptied = left.pop() if left else ([None if t is None else self._place(t) for t in held], None)
        self.stored[value] = places
        if self.streams is None:
            _copy(places, held)
            return
        out = self.streams[0]
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            if emptied is not None:
                out.wait_event(emptied)
            _copy(places, held)
            self.leaving[value] = out.record_event()

    def fetch(self, value: Value) -> Held:
        """Make room for a value and start to copy it back; its place is free."""
        made = self.load(value)
        self.left.setdefault(value.layer, []).append((self.stored.pop(value), self.coming.get(value)))
        return made

    def load(self, value: Value) -> Held:
        """Make room for a value and start to copy it back; it stays on the host as well."""
        stored = self.stored[value]
        made: Held = [None if tensor is None else self._room(tensor) for tensor in stored]
        if self.streams is None:
            _copy(made, stored)
            return made
        back = self.streams[1]
        back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            _copy(made, stored)
            self.coming[value] = back.record_event()
        return made

    def before(self, action: Action) -> None:
        """Let the computing stream wait for what `action` reads and what it will drop."""
        if self.coming:
            self._wait(self.coming, action.reads(self.costs))
        if self.leaving:
            self._wait(self.leaving, action.frees)

    def _wait(self, copies: dict[Value, torch.cuda.Event], values: Iterable[Value]) -> None:
        for value in values:
            event = copies.pop(value, None)
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _place(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor, laid out like it."""
        part = self.slab[self.used : self.used + tensor.numel() * tensor.element_size()]
        self.used += aligned(tensor.numel() * tensor.element_size())
        strides = torch.empty_like(tensor, device="meta").stride()
        return part.view(tensor.dtype).as_strided(tensor.shape, strides)

    def _room(self, stored: Tensor) -> Tensor:
        made = torch.empty_strided(stored.shape, stored.stride(), dtype=stored.dtype, device=self.device)
        self.tracker.track(made)
        return made


def offloaded_bytes(actions: Iterable[Action], stack: ResidualStack) -> int:
    """Bytes of host memory that a step takes: of each layer as many values as are there at a time; 0 for a step without any."""
    there: Counter[int] = Counter()
    most: dict[int, int] = {}
    for action in actions:
        if isinstance(action, Offload):
            there[action.value.layer] += 1
            most[action.value.layer] = max(most.get(action.value.layer, 0), there[action.value.layer])
        elif isinstance(action, Fetch):
            there[action.value.layer] -= 1
    sizes = {k: sum(aligned(math.prod(c.shape) * c.dtype.itemsize) for c in stack.layers[k].carries) for k in most}
    return sum(count * sizes[k] for k, count in most.items())


def aligned(size: int) -> int:
    """`size` rounded up, so that whatever comes after it starts at a good address."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy(targets: Iterable[Tensor | None], sources: Iterable[Tensor | None]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            target.copy_(source, non_blocking=True)


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """The streams of copies out and in; None on a CPU."""
    if device.type != "cuda":
        return None
    if str(device) not in _STREAMS:
        _STREAMS[str(device)] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
    return _STREAMS[str(device)]


def _borrow(device: torch.device, size: int) -> Tensor:
    """A slab of at least `size` bytes, pinned for an accelerator; smaller ones that lie about are let go."""
    free = _FREE.setdefault(str(device), [])
    for index, slab in enumerate(free):
        if slab.numel() >= size:
            return free.pop(index)
    while free:
        _unpin(device, free.pop())
    made = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        code = torch.cuda.cudart().cudaHostRegister(made.data_ptr(), made.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(f"the host refuses to pin {size} bytes (CUDA error {int(code)}): lower Options(host_budget=…)")
    return made


def _unpin(device: torch.device, slab: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
