"""Counting storages."""

from __future__ import annotations

import torch

from adjcomp.runtime.memory import StorageTracker, distinct_bytes


def test_a_storage_counts_until_its_last_view_is_gone() -> None:
    """Given a tensor and a view of it, when the tensor goes, then its bytes stay live until the view goes too."""
    tracker = StorageTracker(100)
    tensor = torch.zeros(10, dtype=torch.float64)
    tracker.track(tensor)
    view = tensor[2:]
    del tensor
    assert tracker.live_bytes == 180
    del view
    assert (tracker.live_bytes, tracker.peak_bytes) == (100, 180)


def test_results_that_do_not_exist_count_nothing() -> None:
    """Given a result list with gaps, then only its tensors are counted."""
    tracker = StorageTracker(0)
    tensors = [None, torch.zeros(4), None]
    tracker.track_all(tensors)
    assert tracker.live_bytes == 16


def test_distinct_bytes_counts_shared_storage_once() -> None:
    """Given a tensor, its transpose and another tensor, then two storages count."""
    first, second = torch.zeros(3, 5), torch.zeros(7)
    assert distinct_bytes([first, first.t(), second]) == 60 + 28
