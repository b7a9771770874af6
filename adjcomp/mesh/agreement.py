"""What ranks have to agree on before they work, and how they hear that they don't."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import torch

from adjcomp.errors import RankError
from adjcomp.runtime.mesh.link import Circle, Link

T = TypeVar("T")
DIGEST_BYTES = 32
SHOWN_LINES = 4


class Outcome:
    """Holds the exception of a block instead of raising it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def agreed(link: Link, what: str, make: Callable[[], T], facts: Callable[[T], str], flag: Callable[[T], bool]) -> tuple[T, bool]:
    """What `make` returns, once all ranks of a plan have made theirs and their facts are equal; and whether any raised its flag.

    A rank whose `make` raises raises that error; all others raise a RankError that names it. Where facts differ, all ranks raise
    a RankError with the lines that do. Afterwards ranks are in step: a caller may go on.
    """
    outcome, made, text = Outcome(), [], ""
    with outcome, link.watch.busy():
        made.append(make())
        text = facts(made[0])
    raised = bool(made) and outcome.error is None and flag(made[0])
    own = _packed(text, outcome.error is not None, raised)
    others = link.agree(own, link.circle, what)
    if any(bool(other[0]) for other in others) or any(not torch.equal(other[2:], own[2:]) for other in others):
        _disagree(link, outcome.error, text, what)
    return made[0], any(bool(other[1]) for other in others)


def _packed(text: str, failed: bool, flag: bool) -> torch.Tensor:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.tensor([int(failed), int(flag), *digest], dtype=torch.uint8)


def _disagree(link: Link, error: Exception | None, text: str, what: str) -> None:
    """Raise what is wrong, on every rank."""
    said = gather_texts(link, link.circle, "" if error is None else f"!{type(error).__name__}: {error}", what)
    texts = gather_texts(link, link.circle, text, what)
    if error is not None:
        raise error
    for rank, words in zip(link.circle.ranks, said, strict=True):
        if words:
            raise RankError(rank, f"rank {rank} raised {words[1:]}")
    odd = next((i for i, other in enumerate(texts) if other != texts[0]), 0)
    rank, first = link.circle.ranks[odd], link.circle.ranks[0]
    raise RankError(rank, f"rank {rank} and rank {first} differ in {what}: {_difference(texts[odd], texts[0])}")


def _difference(own: str, other: str) -> str:
    """The first lines that two texts don't share."""
    left, right = own.splitlines(), other.splitlines()
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a != b][:SHOWN_LINES]
    return "; ".join(f"{a!r} there, {b!r} here" for a, b in pairs) or f"{len(left)} lines there, {len(right)} here"


def gather_texts(link: Link, circle: Circle, text: str, what: str) -> Sequence[str]:
    """The texts of all ranks of a circle."""
    data = text.encode()
    sizes = [int(n) for n in link.agree(torch.tensor([len(data)], dtype=torch.int64), circle, what)]
    own = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
    found = link.agree(own, circle, what)
    return [bytes(t[:n].tolist()).decode() for t, n in zip(found, sizes, strict=True)]
