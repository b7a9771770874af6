"""The proof of a plan: an abstract machine replays every action and checks each rule, each byte and the certificate.

It shares no code with the planner: the rules of the actions are written down in `adjcomp.ir.rules` a second time, from their
meaning.
"""

from __future__ import annotations

import math

from adjcomp.errors import VerifyError
from adjcomp.ir.actions import Action, own_fields
from adjcomp.ir.plan import Plan
from adjcomp.ir.replay import Replay
from adjcomp.ir.rules import BrokenRule

NEIGHBOURS = 3  # actions shown on each side of the failing one


def verify_plan(plan: Plan) -> None:
    """Replay `plan`.

    Raises:
        VerifyError: an action breaks its rule or the budget, something is missing at the end, or the certificate is wrong.
    """
    if (plan.wiring is None) != (len(plan.shares) == 1):
        raise VerifyError("a plan has links where it has several devices, and only there")
    machine = Replay(plan)
    for index, action in enumerate(plan.actions):
        try:
            machine.step(action)
        except BrokenRule as broken:
            raise VerifyError(f"{broken}\n{neighbourhood(plan, index)}") from None
    try:
        machine.finish()
    except BrokenRule as broken:
        raise VerifyError(f"{broken}\n{neighbourhood(plan, len(plan.actions))}") from None
    _check_certificate(plan, machine)


def neighbourhood(plan: Plan, index: int) -> str:
    """The actions around `index`, with an arrow at it."""
    first, last = max(0, index - NEIGHBOURS), min(len(plan.actions), index + NEIGHBOURS + 1)
    lines = [f"{'-->' if i == index else '   '} {i:>6}  {describe(plan.actions[i])}" for i in range(first, last)]
    if index == len(plan.actions):
        lines.append(f"--> {index:>6}  (end of the plan)")
    return "\n".join(lines)


def describe(action: Action) -> str:
    """One action as a line of text: `Forward(layer=3, chunk=0, keep=True) frees x[2,0]`."""
    own = ", ".join(f"{name}={getattr(action, name)}" for name in own_fields(type(action)))
    place = f" on device {action.device}" if action.device else ""
    frees = f" frees {' '.join(str(value) for value in action.frees)}" if action.frees else ""
    return f"{type(action).__name__}({own}){place}{frees}"


def _check_certificate(plan: Plan, machine: Replay) -> None:
    """Compare what was promised with what the replay found."""
    promised = plan.certificate
    for share, peak, kinds in zip(plan.shares, machine.peak, machine.peak_kinds, strict=True):
        if promised.peak_bytes.get(share.name) != peak:
            raise VerifyError(
                f"the certificate promises a peak of {promised.peak_bytes.get(share.name)} bytes on {share.name}; it is {peak}"
            )
        named = promised.bytes_by_kind.get(share.name)
        if named != kinds:
            raise VerifyError(f"the certificate says {named} are live at the peak of {share.name}; it is {kinds}")
    hosts = {share.name: machine.host.peak[d] for d, share in enumerate(plan.shares) if share.host is not None}
    if promised.host_peak_bytes != hosts:
        raise VerifyError(f"the certificate promises host peaks of {promised.host_peak_bytes} bytes; they are {hosts}")
    seconds = math.fsum(machine.seconds) if machine.clock is None else max(machine.clock.free)
    if promised.seconds != seconds:
        raise VerifyError(f"the certificate promises {promised.seconds!r} seconds; the actions take {seconds!r}")
    if not 0 <= promised.lower_bound_seconds <= promised.seconds:
        raise VerifyError(f"the lower bound of {promised.lower_bound_seconds!r} seconds isn't between 0 and {promised.seconds!r}")
