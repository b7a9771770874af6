"""The inference caches of transformers, filled from a State and read into one: a long prefill by chunks feeds `generate`.

Such a cache keeps the last W inputs of a convolution, (B, D, W), the oldest of which no later step reads; a State keeps W - 1 of
them, (B, W - 1, D). States of recurrences are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from adjcomp.passes.streaming import Piece
from adjcomp.state import State

Tensor = torch.Tensor


def cache_of(model: torch.nn.Module, state: State, input_ids: Tensor) -> Any:
    """A new cache of the model that holds `state`.

    input_ids: (B, T) token ids the model takes; one token of each row is run to see what the cache is made of. Raises TypeError
    where the model has no cache, or one whose entries are not those of the state.
    """
    from transformers import Cache

    with torch.no_grad():
        output = model.forward(input_ids=input_ids[:, :1], use_cache=True)
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    if cache is None:
        raise TypeError(f"{type(model).__name__} returns no inference cache")
    places = list(_places(cache))
    if len(places) != len(state):
        raise TypeError(f"the cache of {type(model).__name__} has {len(places)} states, the compiled model {len(state)}")
    with torch.no_grad():
        for (place, windowed), tensor, name in zip(places, state.tensors, state.names, strict=True):
            value = torch.nn.functional.pad(tensor.transpose(1, 2), (1, 0)) if windowed else tensor
            if value.shape != place.shape:
                raise TypeError(f"the cache keeps {tuple(place.shape)} where {name} is {tuple(tensor.shape)}")
            place.copy_(value)
    return cache


def state_of(cache: Any, piece: Piece) -> State:
    """The State that a cache holds, for a piece of a stream."""
    places = list(_places(cache))
    if len(places) != len(piece.names):
        raise ValueError(f"the given cache has {len(places)} states, the model {len(piece.names)}: it comes from another model")
    tensors = (
        (place[..., 1:].transpose(1, 2).contiguous() if windowed else place).to(info.dtype)
        for (place, windowed), info in zip(places, piece.infos, strict=True)
    )
    return State(piece.names, tuple(tensors))


def is_cache(value: object) -> bool:
    """Whether a value is a cache of transformers; nothing is imported for a value that can't be one."""
    if not type(value).__module__.startswith("transformers."):
        return False
    from transformers import Cache

    return isinstance(value, Cache)


def _places(cache: Any) -> Iterator[tuple[Tensor, bool]]:
    """Tensors of a cache, layer by layer, and whether each is the window of a convolution."""
    for layer in cache.layers:
        for i in range(layer.number_of_states):
            if layer.is_conv_states_initialized[i]:
                yield layer.conv_states[i], True
            if layer.is_recurrent_states_initialized[i]:
                yield layer.recurrent_states[i], False
