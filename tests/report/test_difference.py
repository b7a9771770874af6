"""Two plans side by side."""

from __future__ import annotations

from adjcomp.ir.plan import Plan
from adjcomp.report.difference import SAME, plan_difference


def test_a_plan_does_not_differ_from_itself(tight: Plan) -> None:
    assert plan_difference(tight, Plan.from_json(tight.to_json())) == SAME


def test_what_differs_is_named_with_both_figures(tight: Plan, roomy: Plan) -> None:
    lines = plan_difference(tight, roomy).splitlines()
    rows = {line.split("  ")[0]: line for line in lines}
    assert "5.722 MiB" in rows["budget"]
    assert "1.000 GiB" in rows["budget"]
    assert rows["step"].endswith("%")
    assert "tiles: hold" in rows
    assert "seq len" not in rows
