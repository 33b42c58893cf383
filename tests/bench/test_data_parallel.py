"""The benchmark of data-parallel training: its arithmetic, its network and its schedule."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import ranks
from benchmarks.ranks import Network, waiting
from benchmarks.workloads import mlp
from sparsebp.comm.threads import run_ranks
from sparsebp.core.timing import Timing
from sparsebp.runtime.actions import Stages
from sparsebp.schedule import validate
from sparsebp.schedule.builders import data_parallel as schedule_of


def test_hidden_share() -> None:
    timings = {"a": Timing((1.2, 1.0)), "a, alone": Timing((1.0, 1.0)), "sums": Timing((0.4, 0.5))}
    found = ranks.hidden(timings, "a")
    assert found["median"] == pytest.approx((0.5 + 1.0) / 2) and found["rounds"] == 2
    row = {f"{name}_hidden": {"median": 0.5} for name in ("overlap", "priority", "reverse")}
    assert ranks.judge_data_parallel(row | {"share": 0.3}) == "missed: hidden ≥ 60%"
    assert ranks.judge_data_parallel(row | {"share": 0.3, "reverse_hidden": {"median": 0.7}}) == "met"
    assert ranks.judge_data_parallel(row | {"share": 0.1}) == "no target: sums are short"


def test_networks() -> None:
    def work(transport):
        array = np.full(1000, 1.0 + transport.rank)
        silent, slow = Network(transport, 0), Network(transport, 1e6)
        silent.allreduce(array).wait()
        assert (array == 1 + transport.rank).all()
        handles = [slow.allreduce(array), slow.allreduce(array.copy())]
        due = slow.free  # one after the other: 8000 bytes each, at a byte a microsecond
        assert not handles[1].done()
        handles[1].wait()
        assert handles[1].done() and due - handles[0].due == pytest.approx(8e-3)
        handles[0].wait()
        assert (array == 3).all()
        Network(transport, None).allreduce(array).wait()
        assert (array == 6).all()
        few = np.ones(2)
        silent.allreduce(few).wait()
        assert (few == 2).all()

    run_ranks(2, work)


def test_the_schedule_without_overlap() -> None:
    stages = Stages(mlp(3, 3))
    schedule = waiting(schedule_of(stages=len(stages), unweighted=stages.unweighted, fusion="none"))
    validate(schedule)
    (lane,) = schedule.lanes
    kinds = "".join(str(cell).strip("0123456789") for cell in lane.cells)
    assert kinds == "FFFFFWIIWIIWSSSUUU"
