"""A call as a piece of a longer stream: every state of the stack comes from the call before, and goes to the next one.

Only what carries are bound to changes; tile functions, and so their programs, stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adjcomp.errors import CaptureError
from adjcomp.ir.stack import CarryInfo, Layer, ResidualStack


@dataclass(frozen=True)
class Piece:
    """A stack whose states all leave it, and enter it where it is continued.

    names: of the states, in order: layer, and number within it. infos: shape and dtype of each. finals: where each is among the
    final states of the stack. own_finals: how many of these the model itself returns; they come first. continued: whether states
    are given; else the stack starts from the model's own initial states.
    """

    stack: ResidualStack
    names: tuple[str, ...]
    infos: tuple[CarryInfo, ...]
    finals: tuple[int, ...]
    own_finals: int
    continued: bool


def as_piece(stack: ResidualStack, *, continued: bool) -> Piece:
    """Bind every state of `stack` to a final state, and, where `continued`, to an initial state behind those the model makes."""
    names: list[str] = []
    finals: list[int] = []
    layers: list[Layer] = []
    count = stack.final_count
    for layer in stack.layers:
        if layer.stores:
            raise CaptureError(
                f"{layer.name} attends over the whole sequence: its keys and values aren't a state that a call hands on. Pass "
                "the sequence in one call, without a state"
            )
        carries = []
        for i, info in enumerate(layer.carries):
            final, count = (count, count + 1) if info.final is None else (info.final, count)
            initial = stack.initial_count + len(names) if continued else info.initial
            carries.append(replace(info, initial=initial, final=final))
            names.append(f"{layer.name}.{i}")
            finals.append(final)
        layers.append(replace(layer, carries=tuple(carries)))
    return Piece(
        stack=_with_layers(stack, layers, len(names) if continued else 0, count),
        names=tuple(names),
        infos=tuple(info for layer in layers for info in layer.carries),
        finals=tuple(finals),
        own_finals=stack.final_count,
        continued=continued,
    )


def _with_layers(stack: ResidualStack, layers: list[Layer], more_initial: int, finals: int) -> ResidualStack:
    return replace(stack, layers=tuple(layers), initial_count=stack.initial_count + more_initial, final_count=finals)
