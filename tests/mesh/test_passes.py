"""The list of passes that all devices of a plan follow holds each device's own, and is no longer than it must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adjcomp.runtime.mesh.passes import _merged, _supersequence
from adjcomp.runtime.mesh.wholes import most_gathered

LISTS = st.lists(st.integers(0, 4), max_size=9).map(tuple)


def holds(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether `part` is a subsequence of `whole`."""
    rest = iter(whole)
    return all(layer in rest for layer in part)


@given(st.lists(LISTS, max_size=4))
def test_every_devices_passes_are_in_the_common_list(lists: list[tuple[int, ...]]) -> None:
    merged = _merged(lists)
    assert all(holds(merged, own) for own in lists)
    assert len(merged) <= sum(map(len, lists))


@given(LISTS, LISTS)
def test_a_list_that_holds_another_one_is_the_common_list(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert _supersequence(first, first) == first
    found = _supersequence(first, second)
    assert len(found) == len(first) if holds(first, second) else len(found) > len(first)


def test_ranks_hold_as_many_layers_as_there_are_ranks_and_shared_parameters_once() -> None:
    layers = [{"tied": 5, "stem": 1}, {"a": 3}, {"b": 2}, {"tied": 5}]
    assert most_gathered(layers, 2) == 11
    assert most_gathered(layers, 8) == 11
    assert most_gathered(layers[1:], 1) == 8
