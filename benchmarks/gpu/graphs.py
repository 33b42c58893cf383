"""Whole steps on a GPU: launched kernel by kernel, or captured into a graph and replayed; one stream, or two.

``python -m benchmarks gpu-graphs`` (Oh et al., EuroSys 2022, §4): the paper's two recurrent models, and DenseNet. A net
of many small layers waits for Python's launches; once they are captured, the second stream can show what it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import SECONDS, begin
from benchmarks.processes.points import measure_apart
from benchmarks.schedule import find, optimizer_of
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.workload import CELLS, SequenceWorkload
from sparsebp.core import backend, tables, timing
from sparsebp.core.tables import Column
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.search import all_schedules
from sparsebp.schedule import Schedule
from sparsebp.train.ranks import schedule_of

TARGETS = {"capture": 1.3, "streams": 1.1}
"""A captured step over a launched one, on one stream; captured ones on two streams over one."""
WARM = 4
"""Steps before the clock: of these the third is captured."""
LIMIT = 150.0
"""Seconds of a point: the first one on two streams is in search of its orders as well."""
ONE_STREAM = "one stream"
ORDERS = {"conventional": ONE_STREAM, "two": "two streams", "joint": "two streams, joint", "list": "two streams, list"}


class Point(NamedTuple):
    """A network and an order of its steps."""

    network: str
    order: str


Parts = tuple[Any, Any, Any, tuple[Any, Any]]
"""Model, loss, optimizer and batch."""


class Steps:
    """A training step, ready to be timed: compiled, and captured if it can be.

    Parameters
    ----------
    model, loss, optimizer, batch
        What `Executor` takes, and one micro-batch.
    graph
        Whether to capture the step.
    order
        The conventional one if None.
    """

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, batch: tuple[Any, Any], *, graph: bool,
        order: Schedule | None = None,
    ) -> None:  # fmt: skip
        order = schedule_of(Stages(model), "none", 1, "conventional") if order is None else order
        self._batch, self._executor = batch, Executor(model, loss, optimizer, order, graph=graph)
        for _ in range(WARM):
            self()

    def __call__(self) -> None:
        """Run one step."""
        self._executor.step([self._batch])

    @property
    def uncaptured(self) -> str:
        """Why steps are not captured; empty if they are."""
        return "; ".join(self._executor.uncaptured)

    def close(self) -> None:
        """End it, with what it has left over."""
        self._executor.flush()
        self._executor.close()


def measure(run: Run) -> Iterator[Row]:
    """Measure every network in every order.

    Raises
    ------
    DeviceError, MissingDependencyError
        There is no GPU, or CuPy is not installed.
    """
    begin(run)
    points = [Point(network, ONE_STREAM) for network in run.settings["sequences"]]
    points += [Point("DenseNet", order) for order in run.settings["orders"]]
    for row in measure_apart(run, points, make, dict(run.settings), dict(run.rounds), limit=LIMIT):
        if row.get("uncaptured"):
            run.note(f"{row['network']}, {row['order']}: not captured: {row['uncaptured']}")
        yield row


def make(sizes: Mapping[str, Any], rounds: Mapping[str, Any]) -> Callable[[Point], Row]:
    """Return what measures a point, in the process that does."""
    cupy = backend.cupy()
    clock = timing.DeviceClock(cupy)
    return lambda point: measure_point(point, cupy, sizes, rounds, clock)


def measure_point(
    point: Point, xp: ModuleType, sizes: Mapping[str, Any], rounds: Mapping[str, Any], clock: timing.Clock
) -> Row:
    """Time a step launched and captured, in turn; on two streams also in turn with a captured one on one stream."""
    parts = _densenet(xp, sizes) if point.network == "DenseNet" else _sequence(xp, sizes["sequences"][point.network])
    sides = {"launched": (point.order, False), "captured": (point.order, True)}
    if point.order != ONE_STREAM:
        sides["one"] = (ONE_STREAM, True)
    found: dict[str, Steps] = {}
    for name, (words, graph) in sides.items():
        order = None if words == ONE_STREAM else _orders(xp, sizes["densenet"])[words]
        found[name] = Steps(*parts(), graph=graph, order=order)
    reasons = [steps.uncaptured for name, steps in found.items() if name != "launched" and steps.uncaptured]
    kept = {name: steps for name, steps in found.items() if name == "launched" or not steps.uncaptured}
    timings = timing.measure(kept, clock=clock, **rounds)
    for steps in found.values():
        steps.close()
    row: Row = {name: measured.to_dict() for name, measured in timings.items()}
    if "captured" in timings:
        row["capture"] = timing.ratio(timings["launched"], timings["captured"])
        if "one" in timings:
            row["streams"] = timing.ratio(timings["one"], timings["captured"])
    return row | {"uncaptured": "; ".join(dict.fromkeys(reasons))} | judge(row)


def _sequence(xp: ModuleType, sizes: tuple[str, int, int]) -> Callable[[], Parts]:
    device = "cpu" if backend.is_host(xp) else "cuda"

    def parts() -> Parts:
        workload = SequenceWorkload(*sizes, device=device)
        return workload.model, workload.loss, workload.optimizer, (workload.x, workload.target)

    return parts


def _densenet(xp: ModuleType, sizes: Mapping[str, Any]) -> Callable[[], Parts]:
    from sparsebp import models, nn

    size, samples, side = sizes["densenet"]
    device = "cpu" if backend.is_host(xp) else "cuda"
    rng = np.random.default_rng(0)
    images = xp.asarray(rng.standard_normal((samples, 3, side, side), np.float32))
    batch = images, xp.asarray(rng.integers(10, size=samples))

    def parts() -> Parts:
        model = models.densenet(**dict(size), rng=0).to(device)
        return model, nn.CrossEntropyLoss(), optimizer_of(model), batch

    return parts


@cache
def _orders(xp: ModuleType, densenet: tuple[Any, ...]) -> dict[str, Schedule]:
    """Return DenseNet's orders on two streams by name, with the costs that are measured here."""
    parts = _densenet(xp, {"densenet": densenet})
    found = find(lambda: parts()[0], parts()[3])
    shape = {"stages": found.schedule.graph.stages, "unweighted": found.schedule.graph.unweighted}
    known = all_schedules(shape, found.costs) | {trial.name: trial.schedule for trial in found.trials}
    return {words: known[name] for name, words in ORDERS.items() if name in known}


def judge(row: Mapping[str, Any]) -> dict[str, str]:
    """Say whether a row reaches what it is to reach: capture on one stream, streams where there are two."""
    if "captured" not in row:
        return {"met": "not captured"}
    key = "streams" if "streams" in row else "capture"
    return {"met": "met" if row[key]["median"] >= TARGETS[key] else f"missed: {key}"}


def picture(result: Result) -> Any:
    """Draw launched and captured steps."""
    rows, colours = result["rows"], {"launched": "#9ca3af", "captured": "#1e40af"}
    bars = [(name, colour, [1e3 * row[name]["median"] if name in row else 0.0 for row in rows])
            for name, colour in colours.items()]  # fmt: skip
    labels = [f"{row['network']}\n{row['order']}" for row in rows]
    drawing, ax = pictures.bar_chart(labels, bars, "milliseconds a step (median)", each=0.6)
    pictures.legend_below(drawing)
    ax.grid(axis="x", alpha=0.3)
    return drawing


BENCHMARK = Benchmark(
    name="gpu-graphs",
    title="Training steps on a GPU, launched and captured: float32",
    leaves_out="the steps in which a graph is captured or a schedule is found; loading of batches",
    settings={"targets": TARGETS, "dtype": "float32"},
    sizes={
        "sequences": {f"{cell}, T = {length}": (cell, length, 16) for length in (1000, 30_000) for cell in CELLS},
        "densenet": ((), 32, 32),
        "orders": tuple(ORDERS.values()),
    },
    quick={
        "sequences": {"RNN, T = 12": ("RNN", 12, 2)},
        "densenet": ((("depth", 3), ("growth", 1), ("blocks", 1)), 2, 2),
        "orders": (ONE_STREAM, "two streams"),
    },
    rounds={"rounds": 15, "least_rounds": 3, "budget": 4.0},
    threads=None,
    seconds=SECONDS,
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("order", "order", number=False),
        Column("launched", "launched", tables.seconds),
        Column("captured", "captured", tables.seconds),
        Column("capture gains", "capture", tables.times),
        Column("captured, over one stream", "streams", tables.times),
        Column("outcome", "met", number=False),
    ),
    tables={"A step": ("network", "order", "launched", "captured", "capture", "streams", "met")},
    short=("network", "order", "launched", "captured", "capture", "streams", "met"),
    picture=picture,
)
