"""The errors that adjcomp raises by name."""

from __future__ import annotations

from collections.abc import Mapping

from adjcomp.units import format_bytes


class CaptureError(ValueError):
    """The model, or how it was called, is outside of what adjcomp can train exactly; the text names the culprit."""


class VerifyError(ValueError):
    """A plan breaks a rule of its actions, its budget or its certificate; the text shows the action with its neighbours."""


class RankError(RuntimeError):
    """Another rank died, raised, stands still or disagrees; the same error is raised on all ranks.

    Attributes:
        rank: the global rank where the trouble began.
    """

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return (RankError, (self.rank, str(self)))


class BudgetError(ValueError, RuntimeError):
    """No plan fits the budget. Also a RuntimeError, because searches for the largest batch size catch that.

    Attributes:
        requested_bytes: the budget that was asked for.
        minimum_bytes: the smallest budget that can be planned; planning with exactly this many bytes succeeds.
        contributors: kind -> bytes live at the peak of the plan for `minimum_bytes`, largest first; they sum to it.
    """

    def __init__(self, requested_bytes: int, minimum_bytes: int, contributors: Mapping[str, int], *, subject: str = "") -> None:
        self.requested_bytes = requested_bytes
        self.minimum_bytes = minimum_bytes
        self.contributors = dict(sorted(contributors.items(), key=lambda item: (-item[1], item[0])))
        self.subject = subject
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.requested_bytes, self.minimum_bytes, self.contributors, self.subject))

    def _text(self) -> str:
        shares = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.contributors.items() if size > 0)
        what = f" for {self.subject}" if self.subject else ""
        return (
            f"a budget of {format_bytes(self.requested_bytes)} ({self.requested_bytes} bytes) is too small{what}: the minimum is "
            f"{format_bytes(self.minimum_bytes)} ({self.minimum_bytes} bytes). The smallest plan's peak holds: {shares}. "
            "Raise the budget, or lower the batch size or the sequence length."
        )


def _rebuild(requested_bytes: int, minimum_bytes: int, contributors: Mapping[str, int], subject: str) -> BudgetError:
    """A BudgetError from its parts (for pickle, which passes no keywords)."""
    return BudgetError(requested_bytes, minimum_bytes, contributors, subject=subject)
