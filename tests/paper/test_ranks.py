"""Approximate gradients on several ranks are the paper's sums, and only what these need travels."""

from __future__ import annotations

import pytest
from paper_ranks import Form, Found, against_oracles
from ranks import run_ranks

pytestmark = pytest.mark.distributed

FEW = ("diagonal", "selective")
MANY = ("diagonal", "dense", "ssd", "selective", "delta")
ON_TWO = (
    Form(FEW, "layers", "residual", 5),
    Form(FEW, "time", "residual", 5),
)
ALL_FORMS = (("exact", None), ("residual", None), ("exact", 1), ("exact", 5), ("residual", 4), ("exact", 40))
EVERY_FORM = tuple(
    Form(MANY, dimension, coupling, window, length, batch, chunk)
    for dimension in ("layers", "time")
    for (coupling, window), (length, batch, chunk) in zip(
        ALL_FORMS, ((17, 2, 3), (13, 1, 4), (11, 2, 3), (17, 1, 2), (16, 2, 5), (14, 1, 3)), strict=True
    )
)


def check(count: int, forms: tuple[Form, ...]) -> None:
    ended = run_ranks(count, against_oracles, forms, seconds=280)
    assert [end.error for end in ended] == [""] * count
    for index, form in enumerate(forms):
        rows: list[Found] = [end.result[index] for end in ended]
        assert max(row.distance for row in rows) <= 1e-10, (form, rows)
        assert {name for row in rows for name in row.names} == set(rows[0].wanted), form
        assert all(row.sent[0] == row.sent[1] for row in rows), (form, rows)
        returned = {layer for row in rows for layer in row.returned}
        if form.dimension == "time":
            assert not returned, form
        elif form.coupling == "residual":
            assert returned == {len(form.kinds)}, form  # the cotangent of the stream's end, and no other
        else:
            assert returned
            assert max(returned) <= len(form.kinds), form


def test_two_ranks_compute_the_literal_sums() -> None:
    """Given residual coupling and a window, by layers and by time, then gradients are those of the sums as they are written."""
    check(2, ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dimension", ["layers", "time"])
def test_ranks_compute_the_literal_sums_in_every_form(dimension: str, count: int) -> None:
    """Given every form of a gradient and every structure of a recurrence, then the same on more ranks."""
    check(count, tuple(form for form in EVERY_FORM if form.dimension == dimension))


@pytest.mark.slow
def test_a_shorter_window_sends_less() -> None:
    """Given a time placement, then adjoint states that travel grow with the window, and none is beyond it."""
    forms = tuple(Form(FEW, "time", window=window) for window in (1, 3, 6))
    ended = run_ranks(2, against_oracles, forms, seconds=280)
    assert [end.error for end in ended] == ["", ""]
    first, second, third = (sum(end.result[index].adjoints for end in ended) for index in range(3))
    assert second - first == (third - second) * 2 // 3 > 0  # a number of bytes for each step of the window
