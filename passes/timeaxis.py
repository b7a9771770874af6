"""Where time is in a value, and how a node of the graph depends on it: the vocabulary of the time analysis.

LOCAL nodes can be evaluated on any chunk of their inputs; CARRIED nodes are `adjcomp.ops` recurrences and causal windows, which
need
the state left by the chunk before; FREE nodes do not touch time at all; GLOBAL nodes mix time in some other way, and `why` says
how.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


class Locality(enum.Enum):
    """How a node depends on time."""

    FREE = "free"
    LOCAL = "local"
    CARRIED = "carried"
    GLOBAL = "global"


@dataclass(frozen=True)
class TimeLayout:
    """Time in a tensor: dimension `dim` has size outer · T · inner, laid out in that order (a flattened (B, T) has outer = B)."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class NodeTime:
    """What the analysis says of one node; `layouts` has one entry an output tensor (None: no time in it)."""

    locality: Locality
    layouts: tuple[TimeLayout | None, ...] = (None,)
    why: str = ""

    @property
    def layout(self) -> TimeLayout | None:
        """The layout of a single-output node."""
        return self.layouts[0]


class NotLocalError(Exception):
    """Raised by a rule: the op mixes time, and why."""


FREE = NodeTime(Locality.FREE)


def time_factor(size: int | torch.SymInt, time: Any) -> int | None:
    """c where size = c · T; 0 for a plain integer; None for anything else that contains T."""
    if isinstance(size, int):
        return 0
    expression = size.node.expr
    if expression.is_Integer:
        return 0
    coefficient = expression.as_coefficient(time)
    return int(coefficient) if coefficient is not None and coefficient.is_Integer else None


def value_of(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta.get("val")


@dataclass(frozen=True)
class TimeContext:
    """What a rule may ask: the symbol of time, and the layout of an argument among the nodes already classified."""

    time: Any
    known: dict[fx.Node, NodeTime]

    def layout(self, argument: object) -> TimeLayout | None:
        """Time in an argument; None for constants, parameters and whatever has no time."""
        return self.known[argument].layout if isinstance(argument, fx.Node) else None


Layouts = tuple[TimeLayout | None, ...]
Rule = Callable[[TimeContext, fx.Node], TimeLayout | Layouts | None]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def shape_of(argument: object) -> tuple[Any, ...]:
    """Shape of a tensor argument."""
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def product(sizes: Sequence[Any]) -> int:
    """Product of integer sizes."""
    return math.prod(int(size) for size in sizes)
