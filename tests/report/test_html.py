"""A plan's page: whole, alone, and true."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from adjcomp.ir.plan import Plan
from adjcomp.report.html import _Clock, _highest, plan_html
from adjcomp.report.timeline import timelines
from adjcomp.units import format_seconds

VOID = {"meta", "line", "polygon", "br"}


class _Tags(HTMLParser):
    """Checks that every element is closed by its own end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("which", ["tight", "roomy", "spread"])
def test_a_page_is_well_formed_and_asks_nobody(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    plan: Plan = request.getfixturevalue(which)
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert [name for name, _ in tags.attributes if name in ("src", "href")] == []
    assert "http" not in text


def test_the_map_has_a_cell_for_every_tile(tight: Plan) -> None:
    text = plan_html(tight)
    (data,) = re.findall(r'data-grid="modes">(.*?)</script>', text)
    grid = json.loads(data)
    assert grid["names"] == [tile.name for tile in reversed(tight.costs.layers)]
    assert [len(row) for row in grid["rows"]] == [tight.costs.chunk_count] * len(grid["names"])
    assert set("".join(grid["rows"])) > {"h"}  # something is held, something isn't


def test_names_are_escaped(tight: Plan) -> None:
    layers = tuple(replace(tile, name="</script><b>") for tile in tight.costs.layers)
    text = plan_html(replace(tight, costs=replace(tight.costs, layers=layers)))
    assert "</script><b>" not in text


def test_equal_plans_give_equal_pages(tight: Plan) -> None:
    assert plan_html(tight) == plan_html(Plan.from_json(tight.to_json()))


def test_all_devices_are_drawn_over_the_same_time_and_where_one_waits_no_workspace_is_live(spread: Plan) -> None:
    lines = timelines(spread)
    busy = [moments for moments in lines if moments]
    page = plan_html(spread)
    assert page.count("<h2>Memory on ") == len(busy)
    assert page.count(f"<span>0 s</span><span>{format_seconds(spread.seconds)}</span>") >= len(busy)
    last = busy[-1]
    waits = [(a.start + a.seconds, b.start) for a, b in pairwise(last) if b.start > a.start + a.seconds + 1e-6]
    assert waits
    highest = _highest(last, _Clock(0.0, spread.seconds, 20_000))
    begin, end = max(waits, key=lambda wait: wait[1] - wait[0])
    assert highest[int((begin + end) / 2 / spread.seconds * 20_000)].sizes[-1] == 0
