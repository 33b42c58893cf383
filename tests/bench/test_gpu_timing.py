"""Timing on a GPU, on the stand-in: calls wait in a queue, the host's time is apart, the clock is measured."""

from __future__ import annotations

import time

import numpy as np
import pytest

from backends import make_backend
from benchmarks.gpu_timing import _LONGEST_SPIN, COPIES, Queued, measured, ratio
from sparsebp.core.timing import Call

pytestmark = pytest.mark.gpu
ROUNDS = {"rounds": 3, "least_rounds": 3, "budget": 1.0}


@pytest.fixture
def cupy():
    return make_backend("gpu").xp


def test_the_hosts_time_is_not_the_gpus(cupy):
    """A call that keeps the host for 2 ms and the GPU for next to nothing is short, once it waits in a queue."""
    a = cupy.ones(3)

    def call() -> None:
        time.sleep(2e-3)
        a.fill(1)

    found = measured({"queued": call}, cupy, ROUNDS)["queued"]
    plain = measured({"plain": call}, cupy, ROUNDS, queue=False)["plain"]
    assert found["queued"] and found["host"] > 2e-3 > 4 * found["median"]
    assert not plain["queued"] and plain["median"] > 2e-3
    assert len(found["all"]) == found["rounds"] == 3
    assert ratio(plain, found)["median"] == pytest.approx(np.median(np.array(plain["all"]) / np.array(found["all"])))


def test_calls_that_wait_for_a_result_are_not_said_to_be_queued(cupy):
    timed = Queued(cupy)
    timed._cycles = _LONGEST_SPIN
    row = timed(Call(lambda _: float(cupy.ones(3).sum())), 2)
    assert not row["queued"]


def test_what_calls_need_is_prepared_before_the_clock_starts(cupy):
    log: list[str] = []
    row = Queued(cupy)(Call(log.append, lambda: (log.append("made"), "run")[1]))
    assert log == ["made"] * COPIES + ["run"] * COPIES
    assert row["hertz"] > 0
