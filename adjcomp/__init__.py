"""Train state-space and recurrent models on very long sequences within a byte budget, with exact gradients.

Public names are imported when they are first used: the command line answers without waiting for torch, and a program pays only
for what it asks for.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adjcomp import ops
    from adjcomp.accounting import VjpCosts, vjp_costs
    from adjcomp.api import check_gradients, compile
    from adjcomp.errors import BudgetError, CaptureError, RankError, VerifyError
    from adjcomp.explanation import explain
    from adjcomp.gradients import GradientReport
    from adjcomp.ir.plan import Plan
    from adjcomp.offline import frontier, max_context, plan
    from adjcomp.options import Options
    from adjcomp.state import State
    from adjcomp.stepping import Stats
    from adjcomp.variants import ApproximationWarning

__all__ = [
    "ApproximationWarning",
    "BudgetError",
    "CaptureError",
    "GradientReport",
    "Options",
    "Plan",
    "RankError",
    "State",
    "Stats",
    "VerifyError",
    "VjpCosts",
    "check_gradients",
    "compile",
    "explain",
    "frontier",
    "max_context",
    "ops",
    "plan",
    "vjp_costs",
]

# Where each public name is defined; type checkers read the imports above instead.
_HOMES = {
    "ApproximationWarning": "adjcomp.variants",
    "BudgetError": "adjcomp.errors",
    "CaptureError": "adjcomp.errors",
    "GradientReport": "adjcomp.gradients",
    "Options": "adjcomp.options",
    "Plan": "adjcomp.ir.plan",
    "RankError": "adjcomp.errors",
    "State": "adjcomp.state",
    "Stats": "adjcomp.stepping",
    "VerifyError": "adjcomp.errors",
    "VjpCosts": "adjcomp.accounting",
    "check_gradients": "adjcomp.api",
    "compile": "adjcomp.api",
    "explain": "adjcomp.explanation",
    "frontier": "adjcomp.offline",
    "max_context": "adjcomp.offline",
    "plan": "adjcomp.offline",
    "vjp_costs": "adjcomp.accounting",
}

if os.environ.get("ADJCOMP_LOGS"):
    importlib.import_module("adjcomp.logs")


def __getattr__(name: str) -> object:
    """The public name, imported now (PEP 562)."""
    if name == "ops":  # a subpackage: importing it sets the attribute
        return importlib.import_module("adjcomp.ops")
    if name not in _HOMES:
        raise AttributeError(f"module 'adjcomp' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
