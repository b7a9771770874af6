"""Train state-space and recurrent models on very long sequences within a byte budget, with exact gradients."""

import adjcomp.runtime.kernels.registry  # noqa: F401 - registers the kernels of adjcomp.ops
from adjcomp import ops
from adjcomp.api import check_gradients, compile
from adjcomp.errors import BudgetError, CaptureError, VerifyError
from adjcomp.gradients import GradientReport
from adjcomp.ir.plan import Plan
from adjcomp.options import Options
from adjcomp.session import Stats

__all__ = [
    "BudgetError",
    "CaptureError",
    "GradientReport",
    "Options",
    "Plan",
    "Stats",
    "VerifyError",
    "check_gradients",
    "compile",
    "ops",
]
