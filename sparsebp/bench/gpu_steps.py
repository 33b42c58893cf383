"""Whole training steps of a DenseNet on a GPU: launched kernel by kernel, or captured into a graph; one stream, or two.

A part of ``sparsebp bench gpu`` (Oh et al., EuroSys 2022, §4). A net of many small layers waits for Python's launches;
once they are captured, the second stream can show what it gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.bench.schedule import find, optimizer_of
from sparsebp.bench.tools import report
from sparsebp.bench.tools.benchmark import Row
from sparsebp.bench.tools.report import Column
from sparsebp.core import timing
from sparsebp.runtime.candidates import all_schedules
from sparsebp.runtime.executor import Executor

BATCH = 32
TARGETS = {"capture": 1.3, "streams": 1.1}
"""A captured step over a launched one, on one stream; captured ones on two streams over one."""
WARM = 4
"""Steps before the clock: of these the third is captured."""

COLUMNS = (
    Column("DenseNet, k = 12", "order", number=False),
    Column("batch", "batch"),
    Column("launched", "launched", report.seconds),
    Column("captured", "captured", report.seconds),
    Column("capture gains", "capture", report.times),
    Column("captured, over one stream", "streams", report.times),
    Column("outcome", "met", number=False),
)


def measure_steps(
    xp: ModuleType, quick: bool, rounds: Mapping[str, Any], clock: timing.Clock
) -> tuple[list[Row], list[str]]:
    """Time a step in every order, launched and captured, in turn.

    Parameters
    ----------
    xp
        CuPy; on the host nothing is captured, and a note says so.
    quick
        A much smaller net.
    rounds, clock
        As `sparsebp.core.timing.measure` takes them.

    Returns
    -------
    rows, notes
        A row for each order, and why it was not captured where it was not.
    """
    from sparsebp import models, nn

    size: dict[str, Any] = {"depth": 7, "growth": 2, "blocks": 2} if quick else {}
    samples, side = (2, 8) if quick else (BATCH, 32)
    device = "cpu" if backend.is_host(xp) else "cuda"
    rng = np.random.default_rng(0)
    images = xp.asarray(rng.standard_normal((samples, 3, side, side), np.float32))
    batch = images, xp.asarray(rng.integers(10, size=samples))

    def make() -> Any:
        return models.densenet(**size, rng=0).to(device)

    names = {"conventional": "one stream", "two": "two streams", "joint": "two streams, joint",
             "list": "two streams, list"}  # fmt: skip
    found = find(make, batch)
    shape = {"stages": found.schedule.graph.stages, "unweighted": found.schedule.graph.unweighted}
    known = all_schedules(shape, found.costs) | {trial.name: trial.schedule for trial in found.trials}
    orders = {words: known[name] for name, words in names.items()}
    notes: list[str] = []
    calls: dict[str, timing.Call] = {}
    executors: list[Executor] = []
    for name, order in orders.items():
        for graph in (False, True):
            model = make()
            executor = Executor(model, nn.CrossEntropyLoss(), optimizer_of(model), order, graph=graph)
            executors.append(executor)
            for _ in range(WARM):
                executor.step([batch])
            if graph and executor.uncaptured:
                notes.append(f"{name}: not captured: {'; '.join(executor.uncaptured)}")
                continue
            calls[f"{name}, {graph}"] = timing.Call(_stepping(executor, batch))
    timings = timing.measure(calls, clock=clock, **rounds)
    for executor in executors:
        executor.flush()
        executor.close()
    rows = []
    for name in orders:
        row: Row = {"order": name, "batch": samples, "launched": timings[f"{name}, False"].to_dict()}
        if f"{name}, True" in timings:
            captured = timings[f"{name}, True"]
            row["captured"] = captured.to_dict()
            row["capture"] = timing.ratio(timings[f"{name}, False"], captured)
            if name != "one stream" and "one stream, True" in timings:
                row["streams"] = timing.ratio(timings["one stream, True"], captured)
        rows.append(row | judge(row))
    return rows, notes


def _stepping(executor: Executor, batch: tuple[Any, Any]) -> Any:
    return lambda _: executor.step([batch])


def judge(row: Mapping[str, Any]) -> dict[str, str]:
    """Say whether a row reaches what it is to reach: capture on one stream, streams where there are two."""
    if "captured" not in row:
        return {"met": "not captured"}
    key = "streams" if "streams" in row else "capture"
    return {"met": "met" if row[key]["median"] >= TARGETS[key] else f"missed: {key}"}
