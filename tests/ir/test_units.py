"""Byte counts: what is read, what is refused, what is printed."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adjcomp.errors import BudgetError
from adjcomp.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("800MB", 800_000_000),
        ("16 GB", 16_000_000_000),
        ("1.5TiB", 3 << 39),
        (" 2 kib ", 2048),
        ("7B", 7),
        ("1EiB", 1 << 60),
        (5, 5),
        (1 << 62, 1 << 62),
    ],
)
def test_a_size_with_a_unit_or_in_whole_bytes_is_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["lots", "16", "-1GiB", -5, 0, "16GiBB", "", "GiB", "1e3GB", "0MB", "0.0001B", "१GB", "16 GiB please"]
)
def test_other_strings_and_sizes_are_refused_with_the_accepted_forms(text: int | str) -> None:
    with pytest.raises(ValueError, match=r"accepted: .*16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [1.5, True, None, b"16GiB"])
def test_other_types_are_refused_with_the_accepted_forms(size: object) -> None:
    with pytest.raises(TypeError, match=r"accepted: .*16GiB"):
        parse_bytes(size)  # type: ignore[arg-type]


@given(st.integers(1, 1 << 62))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= 1e-3 * size


def test_seconds_are_printed_in_the_unit_that_people_use() -> None:
    assert [format_seconds(s) for s in (2e-6, 0.0123, 1.5, 200, 7500)] == [
        "2.0 us",
        "12.30 ms",
        "1.50 s",
        "3 min 20 s",
        "2 h 05 min",
    ]


def test_a_budget_error_is_both_kinds_of_error_and_survives_pickling() -> None:
    error = BudgetError(1000, 5000, {"borders": 1000, "parameters": 4000}, subject="batch 2, 64 tokens")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert isinstance(again, RuntimeError)
    assert (again.requested_bytes, again.minimum_bytes) == (1000, 5000)
    assert list(again.contributors) == ["parameters", "borders"]
    assert "minimum is 4.883 KiB (5000 bytes)" in str(again)
    assert "batch 2, 64 tokens" in str(again)
