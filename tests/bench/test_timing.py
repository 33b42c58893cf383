"""Timing in turn: order, preparation, budget, ratios. The tests hold the clock; nothing here measures time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import harness
from sparsebp.core import timing
from sparsebp.core.errors import OptionError
from sparsebp.core.threads import get_threads


class FakeClock:
    """Returns the seconds that it is given, one after another, and runs the call; `running` while it does."""

    rest = 0.0

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = itertools.cycle(seconds)
        self.running = False

    def __call__(self, run: Callable[[], object]) -> float:
        self.running = True
        run()
        self.running = False
        return next(self.seconds)


def test_every_round_runs_every_side_and_starts_with_the_next_one() -> None:
    timed: list[str] = []
    untimed: list[str] = []
    clock = FakeClock([1.0])
    calls = {
        name: timing.Call(lambda _, name=name: (timed if clock.running else untimed).append(name)) for name in "abc"
    }
    result = timing.measure(calls, rounds=3, least_rounds=1, warmup=1, clock=clock)
    assert timed == [*"abc", *"abc", *"bca", *"cab"]
    assert untimed == timed, "each timed run follows an untimed one of the same side, after the rest"
    assert {name: len(t.seconds) for name, t in result.items()} == {"a": 3, "b": 3, "c": 3}


def test_preparation_runs_before_every_timed_run_and_hands_over_its_value() -> None:
    numbers = itertools.count()
    seen: list[int] = []
    inside: list[bool] = []
    clock = FakeClock([1.0])

    def prepare() -> int:
        inside.append(clock.running)
        return next(numbers)

    timing.measure({"a": timing.Call(seen.append, prepare)}, rounds=4, least_rounds=4, warmup=1, clock=clock)
    assert seen == list(range(2 * 5)), "every run has a preparation of its own"
    assert not any(inside), "the preparation must not be timed"


def test_short_calls_are_timed_together() -> None:
    runs: list[bool] = []
    clock = FakeClock([1e-4])
    result = timing.measure(
        {"a": timing.Call(lambda _: runs.append(clock.running))}, rounds=1, least_rounds=1, warmup=1, clock=clock
    )
    assert sum(runs) == 1 + 10  # ten of 0.1 ms fill a millisecond
    assert len(runs) - sum(runs) == 1 + timing.WARM
    assert result["a"].seconds == (1e-4 / 10,)


def test_the_budget_stops_after_the_least_rounds() -> None:
    result = timing.measure(
        {"a": timing.Call(lambda _: None)}, rounds=50, least_rounds=3, budget=0.0, clock=FakeClock([1.0])
    )
    assert len(result["a"].seconds) == 3


def test_median_quartiles_and_pairwise_ratio() -> None:
    ours, peer = timing.Timing((1.0, 2.0, 4.0)), timing.Timing((10.0, 40.0, 40.0))
    assert (ours.median, ours.quartiles) == (2.0, (1.5, 3.0))
    # Round by round 10, 20, 10: not the ratio of the medians, which is 20.
    assert timing.ratio(peer, ours) == {"median": 10.0, "low": 10.0, "high": 15.0, "rounds": 3}


@pytest.mark.parametrize(("rounds", "least"), [(0, 0), (2, 3), (5, 0)])
def test_rounds_that_do_not_fit_are_refused(rounds: int, least: int) -> None:
    with pytest.raises(OptionError, match="least_rounds"):
        timing.measure({}, rounds=rounds, least_rounds=least)


def test_threads_are_set_and_put_back() -> None:
    torch = pytest.importorskip("torch")
    before = get_threads(), torch.get_num_threads()
    with harness.using_threads(1):
        assert (get_threads(), torch.get_num_threads()) == (1, 1)
    assert (get_threads(), torch.get_num_threads()) == before
    with pytest.raises(OptionError, match="threads"), harness.using_threads(10_000):
        pass


def test_thread_counts_beyond_the_machine_are_left_out_with_a_word() -> None:
    notes: list[str] = []
    assert harness.thread_counts_here((1, 10_000), notes.append) == (1,)
    assert len(notes) == 1
    assert "10000" in notes[0]


def test_the_host_clock_returns_seconds_above_zero() -> None:
    assert timing.HostClock()(lambda: np.ones(10).sum()) > 0
