"""Timings of tiles: by the executor, nothing of the model touched; kept where runs agree, measured again where they don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fidelity
import pytest
import torch
from attending import hybrid
from fidelity import compare, next_token, tokens
from hypothesis import given
from hypothesis import strategies as st

import adjcomp
from adjcomp import calibration
from adjcomp.runtime.calibrate import STEADY_SECONDS, STEADY_SHARE, Timing, timing_of

LENGTH = 40


@pytest.fixture
def calibrating(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """However short a step is, its tiles are timed; returns the folder of timings, empty at first."""
    monkeypatch.setattr("adjcomp.planning.CALIBRATE_FROM_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "_MEASURED", {})
    monkeypatch.setattr(calibration, "private_folder", lambda _: tmp_path)
    return tmp_path


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], list[int]]:
    """`timings(seconds, steady)`: from now on every tile takes so long; returns the layers that are timed."""
    timed: list[int] = []

    def every_tile(seconds: float, steady: bool) -> list[int]:
        def time_tile(stack: object, layer: int, *_: object) -> dict[str, Timing]:
            timed.append(layer)
            return dict.fromkeys(calibration.PARTS, Timing(seconds, steady))

        monkeypatch.setattr(calibration, "time_tile", time_tile)
        return timed

    return every_tile


def test_tiles_are_timed_without_touching_the_model(calibrating: Path) -> None:
    """Given a model, when its tiles are timed for the first plan, then gradients are exact, no random number is drawn, and every
    kind of tile has times."""
    model = fidelity.mamba(num_hidden_layers=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled = adjcomp.compile(model)
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    plan = compiled.plan_for(batch_size=1, seq_len=LENGTH)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    known = [calibration.read_timings(path.read_text()) for path in sorted(calibrating.iterdir())]
    assert len(known) >= 3  # stem, layers, head
    assert all(timing.seconds > 0 for rows in known if rows for row in rows.values() for timing in row.values())
    compare(model, compiled, next_token(tokens(1, LENGTH)))
    assert compiled.plan.costs.layers == plan.costs.layers


def test_tiles_that_attend_are_timed_on_their_own_keys(calibrating: Path) -> None:
    """Given attention, when its tiles are timed for the first plan, then they have times and gradients are exact."""
    model, ids = hybrid(), tokens(1, 33, vocab=31)
    compiled = adjcomp.compile(model, chunk=16)
    compare(model, compiled, lambda m: m(ids).pow(2).sum(), bound=1e-10)
    assert all(tile.forward_seconds > 0 for tile in compiled.plan.costs.layers if tile.reads_past)
    assert len(list(calibrating.iterdir())) >= 4


def test_a_shorter_sequence_keeps_the_times(calibrating: Path) -> None:
    """Given a measured plan, when a shorter sequence is served by it, then its seconds are measured ones too."""
    compiled = adjcomp.compile(fidelity.mamba(num_hidden_layers=1), chunk=8)
    longer = compiled.plan_for(batch_size=1, seq_len=LENGTH)
    ids = tokens(1, 24)
    compiled(input_ids=ids, labels=ids)
    assert compiled.plan.costs.seq_len == 24
    assert compiled.plan.costs.layers == longer.costs.layers


def test_timings_that_agree_are_measured_once(calibrating: Path, timings: Callable[[float, bool], list[int]]) -> None:
    model = fidelity.mamba(num_hidden_layers=1)
    timed = timings(2.0, True)
    first = adjcomp.compile(model, "100MB").plan_for(batch_size=1, seq_len=LENGTH)
    times = len(timed)
    calibration._MEASURED.clear()  # as another process would
    timings(1.0, True)
    assert adjcomp.compile(model, "100MB").plan_for(batch_size=1, seq_len=LENGTH).to_json() == first.to_json()
    assert len(timed) == times > 0


def test_timings_of_a_busy_machine_are_measured_again_by_the_next_process(
    calibrating: Path, timings: Callable[[float, bool], list[int]]
) -> None:
    """Given runs that disagreed, when another process plans, then it measures again and the smaller seconds stay; the process
    itself stays with what it measured."""
    model = fidelity.mamba(num_hidden_layers=1)
    timed = timings(2.0, False)
    noisy = adjcomp.compile(model, "100MB").plan_for(batch_size=1, seq_len=LENGTH)
    times = len(timed)
    assert adjcomp.compile(model, "100MB").plan_for(batch_size=1, seq_len=LENGTH).to_json() == noisy.to_json()
    assert len(timed) == times
    calibration._MEASURED.clear()
    timings(1.0, True)
    assert adjcomp.compile(model, "100MB").plan_for(batch_size=1, seq_len=LENGTH).seconds == pytest.approx(noisy.seconds / 2)
    assert len(timed) == 2 * times


@pytest.mark.parametrize("text", ["", "[1]", '{"256": 3}', '{"256": {"vjp": [1.0, true]}}', '{"256": {"forward": 1.0}}'])
def test_a_file_that_is_broken_counts_as_none(text: str) -> None:
    assert calibration.read_timings(text) is None


SECONDS = st.floats(1e-6, 10.0)


@given(samples=st.lists(SECONDS, min_size=1, max_size=15), slower=st.floats(1.0, 100.0))
def test_disturbed_runs_hardly_change_a_timing(samples: list[float], slower: float) -> None:
    """Given runs of which some are disturbed, then a timing is never far over the fastest, and steady if half of them agree."""
    timing = timing_of(samples)
    most = min(samples) + max(STEADY_SHARE * min(samples), STEADY_SECONDS)
    assert min(samples) <= timing.seconds <= most
    disturbed = timing_of([*samples, *(slower * max(samples) for _ in samples[1:])])
    assert disturbed.seconds <= most
    assert timing_of(samples[:1] * 5).steady


@given(one=SECONDS, other=SECONDS, steady=st.booleans())
def test_the_smaller_of_two_timings_stays(one: float, other: float, steady: bool) -> None:
    """Given two timings, when they are joined, then the smaller stays, and can be trusted if both nearly agree."""
    known, measured = ({256: {"forward": Timing(seconds, sure)}} for seconds, sure in ((one, False), (other, steady)))
    joined = calibration.agreed(known, measured)[256]["forward"]
    assert joined.seconds == min(one, other)
    near = max(one, other) <= min(one, other) * (1 + STEADY_SHARE)
    assert joined.steady == (near or (steady and other < one))
    assert calibration.read_timings(calibration.timings_text(measured)) == measured
