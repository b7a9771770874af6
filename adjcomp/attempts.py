"""A step that is planned anew, once, when the device runs out of memory before the plan expected it to.

Budgets count tensors; fragmentation, other programs and communication buffers can take what a plan relied on. The second plan
stays under a smaller effective budget, which later steps keep.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch

from adjcomp.errors import BudgetError
from adjcomp.ir.executable import Executable
from adjcomp.runtime.executor import Step
from adjcomp.runtime.values import Cotangents, StepGradients, StepOutputs
from adjcomp.units import format_bytes

log = logging.getLogger("adjcomp")
SHRINK = 0.8  # effective budget of the second plan, as a share of the first plan's peak
_CPU_TEXTS = ("can't allocate memory", "not enough memory")  # of RuntimeErrors: the CPU allocator has no class of its own


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised this."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_TEXTS)


class Attempts:
    """The steps of one call: one, or a second one under a smaller plan.

    make: a new step of an executable, with the same inputs and seed. smaller: the executable under an effective budget, in bytes.
    """

    def __init__(self, executable: Executable, make: Callable[[Executable], Step], smaller: Callable[[int], Executable]) -> None:
        self.make = make
        self.smaller = smaller
        self.step = make(executable)
        self.again = False

    def forward(self) -> StepOutputs:
        """The forward of the step."""
        try:
            return self.step.forward()
        except (RuntimeError, MemoryError) as error:
            if not self._worth_another(error):
                raise
            reason = str(error)
        self._plan_again(reason)
        return self.step.forward()

    def backward(self, given: Cotangents) -> StepGradients:
        """The backward of the step; a second attempt runs its forward first, on the inputs that are still there."""
        try:
            return self.step.backward(given)
        except (RuntimeError, MemoryError) as error:
            if not self._worth_another(error):
                raise
            reason = str(error)
        self._plan_again(reason)
        self.step.forward()
        return self.step.backward(given)

    def forget(self) -> None:
        """Drop everything held for a backward that will not come."""
        self.step.forget()

    def _worth_another(self, error: BaseException) -> bool:
        """Ranks of a mesh run one plan: none of them can change its own."""
        return not self.again and self.step.exchange is None and is_out_of_memory(error)

    def _plan_again(self, reason: str) -> None:
        """Called outside of the handler: the traceback, and with it every tensor of the failed step, is gone by then."""
        self.again = True
        plan = self.step.executable.plan
        budget = int(SHRINK * max(plan.peak_bytes.values()))
        self.step.forget()
        if self.step.tiles.device.type == "cuda":
            torch.cuda.empty_cache()
        first_line = reason.splitlines()[0] if reason else "out of memory"
        try:
            executable = self.smaller(budget)
        except BudgetError as error:
            raise torch.OutOfMemoryError(
                f"out of memory ({first_line}) at a predicted peak of {format_bytes(max(plan.peak_bytes.values()))}, and no plan "
                f"fits {format_bytes(budget)}: the smallest takes {format_bytes(error.minimum_bytes)}"
            ) from None
        warnings.warn(
            f"out of memory ({first_line}): planned again for {format_bytes(budget)}, and so are later steps",
            RuntimeWarning,
            stacklevel=2,
        )
        self.step = self.make(executable)
