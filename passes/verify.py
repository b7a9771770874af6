"""The last pass: prove a plan. The checker stands beside the data that it checks; here it takes its place in the pipeline."""

from __future__ import annotations

from adjcomp.ir.plan import Plan
from adjcomp.ir.verify import verify_plan


def verify(plan: Plan) -> Plan:
    """`plan` itself, after a replay of all of its actions.

    Raises:
        VerifyError: the plan breaks a rule, a budget or its certificate; the text shows where.
    """
    verify_plan(plan)
    return plan
