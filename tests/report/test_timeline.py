"""The timeline agrees with the certificate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from adjcomp.errors import VerifyError
from adjcomp.ir.plan import Plan
from adjcomp.report.timeline import timelines


def test_the_highest_moment_is_the_promised_peak(tight: Plan) -> None:
    (moments,) = timelines(tight)
    assert max(moment.peak_bytes for moment in moments) == tight.peak_bytes["cpu"]


def test_actions_follow_each_other_until_the_predicted_end(tight: Plan) -> None:
    (moments,) = timelines(tight)
    assert len(moments) == len(tight.actions)
    for before, after in pairwise(moments):
        assert after.start == pytest.approx(before.start + before.seconds)
    assert moments[-1].start + moments[-1].seconds == pytest.approx(tight.seconds)


def test_a_plan_that_cannot_run_is_refused(tight: Plan) -> None:
    with pytest.raises(VerifyError, match="can't run"):
        timelines(replace(tight, actions=tight.actions[1:]))
