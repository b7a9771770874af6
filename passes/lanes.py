"""Memory of actions that run side by side on the streams of one device."""

from __future__ import annotations

from adjcomp.ir.actions import Action, Adjoint, HeadVjp
from adjcomp.ir.values import Value, keep
from adjcomp.passes.recipes import Recipes


class Lanes:
    """What streams need between a Fork and its Join, over what was live at the Fork and stays until the Join."""

    def __init__(self, recipes: Recipes) -> None:
        self.recipes = recipes
        self._own: dict[Value, int] = {}  # what was made since the Fork and is live
        self._level: dict[int, int] = {}
        self._most: dict[int, int] = {}

    @property
    def extra_bytes(self) -> int:
        """The peaks of all streams together: in some order they come at the same moment."""
        return sum(self._most.values())

    def add(self, action: Action) -> None:
        """One more action of its stream."""
        recipe, chunk = self.recipes.of(action)
        level = self._level.get(action.stream, 0)
        top = level + recipe.workspace + self._held_back(action, chunk)
        after = level + recipe.made_bytes
        for kind, layer, offset in recipe.writes:
            value = Value(kind, layer, chunk + offset)
            self._own[value] = self.recipes.size(value)
        for value in action.frees:
            after -= self._own.pop(value, 0)
        self._level[action.stream] = after
        self._most[action.stream] = max(self._most.get(action.stream, 0), top, after)

    def _held_back(self, action: Action, chunk: int) -> int:
        """Bytes that a VJP on its own would drop while it runs, and its workspace doesn't count."""
        if not isinstance(action, Adjoint | HeadVjp):
            return 0
        layer = self.recipes.costs.head if isinstance(action, HeadVjp) else action.layer
        internals = keep(layer, chunk)
        return 0 if internals in self._own else self.recipes.size(internals)
