"""The order in which a plan comes by its layers: a pass is a run of actions on tiles of one layer, whatever their chunks.

Devices that store other residual chunks recompute other layers. What all of them do together, such as gathering a layer's
parameters, follows a list that has every device's own passes in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from adjcomp.ir.actions import Action, HeadVjp, Loss, Mark, Turn, own_fields
from adjcomp.ir.plan import Plan

Layers = tuple[int, ...]


def layer_of(action: Action, head: int) -> int | None:
    """The layer whose parameters an action reads; None where it reads none."""
    if isinstance(action, Loss | HeadVjp):
        return head
    if isinstance(action, Mark) or "layer" not in own_fields(type(action)):
        return None
    layer: int = action.layer  # type: ignore[attr-defined]
    return layer


def common_passes(plan: Plan) -> tuple[Layers, Layers]:
    """The passes before the Turn and after it, in an order that holds those of every device."""
    forwards: dict[Layers, None] = {}
    backwards: dict[Layers, None] = {}
    for device in range(len(plan.shares)):
        actions = [action for action in plan.actions if action.device == device]
        turn = next((i for i, action in enumerate(actions) if isinstance(action, Turn)), len(actions))
        forwards[_passes(actions[:turn], plan.costs.head)] = None
        backwards[_passes(actions[turn:], plan.costs.head)] = None
    return _merged(forwards), _merged(backwards)


def _passes(actions: Iterable[Action], head: int) -> Layers:
    layers = (layer_of(action, head) for action in actions)
    return tuple(layer for layer, _ in groupby(layer for layer in layers if layer is not None))


def _merged(lists: Iterable[Layers]) -> Layers:
    """A short list that holds each of some lists as a subsequence."""
    merged: Layers = ()
    for own in lists:
        merged = _supersequence(merged, own)
    return merged


def _supersequence(first: Sequence[int], second: Sequence[int]) -> Layers:
    """The shortest list that holds two lists, by the length of what is left of both."""
    if tuple(first) == tuple(second):
        return tuple(first)
    n, m = len(first), len(second)
    left = [[0] * (m + 1) for _ in range(n + 1)]
    for i in range(n, -1, -1):
        for j in range(m, -1, -1):
            if i == n or j == m:
                left[i][j] = n - i + m - j
            elif first[i] == second[j]:
                left[i][j] = 1 + left[i + 1][j + 1]
            else:
                left[i][j] = 1 + min(left[i + 1][j], left[i][j + 1])
    found: list[int] = []
    i = j = 0
    while i < n or j < m:
        both = i < n and j < m and first[i] == second[j]
        ahead = both or j == m or (i < n and left[i + 1][j] <= left[i][j + 1])
        found.append(first[i] if ahead else second[j])
        i, j = i + ahead, j + (both or not ahead)
    return tuple(found)
