"""What a recurrent model remembers at the end of a call: the state from which the next piece of the stream goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from adjcomp.passes.streaming import Piece


@dataclass(frozen=True)
class State:
    """The states of all layers after a piece of a stream.

    names: layer and number within it ("backbone.layers.0.1"). tensors: one each, (B, …): states of recurrences, and the last
    steps before the border that a causal convolution or a shift looks back to. They carry gradients.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    def detach(self) -> State:
        """The same values without history: gradients of the next piece end here (truncated backpropagation)."""
        return self._map(torch.Tensor.detach)

    def clone(self) -> State:
        """A copy of its own."""
        return self._map(torch.Tensor.clone)

    def to(self, device: torch.device | str) -> State:
        """On another device."""
        return self._map(lambda tensor: tensor.to(device))

    def requires_grad_(self, requires_grad: bool = True) -> State:
        """Ask for gradients with respect to these tensors (leaves only, as with tensors)."""
        return self._map(lambda tensor: tensor.requires_grad_(requires_grad))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        rows = (f"{name} {tuple(t.shape)}" for name, t in zip(self.names, self.tensors, strict=True))
        return f"State({', '.join(rows)})"


def check_state(state: State, piece: Piece) -> None:
    """ValueError naming the layer where a state doesn't fit the model or the batch."""
    if state.names != piece.names:
        raise ValueError(
            f"initial_state holds {len(state.names)} states ({', '.join(state.names[:3])} …), the model has {len(piece.names)} "
            f"({', '.join(piece.names[:3])} …): it comes from another model"
        )
    for name, tensor, info in zip(state.names, state.tensors, piece.infos, strict=True):
        if tuple(tensor.shape) != info.shape or tensor.dtype is not info.dtype:
            raise ValueError(
                f"initial_state of {name} is {tuple(tensor.shape)} {tensor.dtype}, this call needs {info.shape} {info.dtype}"
            )
