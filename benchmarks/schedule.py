"""Whole steps on one stream and on two, in the conventional order and out of order; measured beside simulated.

``python -m benchmarks schedule``. Every side runs forward, backward and updates of the same network. On one stream: on
one core; with kernels and BLAS that use all cores by themselves; the same with the updates at the end, which is what
``Trainer(schedule="conventional")`` runs. On two streams of one core each: weight gradients in the conventional order,
in that of joint scheduling (Oh et al., 2022, Algorithm 1), and in that of list scheduling. ``schedule="ooo"`` measures
them in its first steps and keeps one: the column "kept" says which, and its time is measured again with all others. All
but ``"conventional"`` update each parameter right after its gradient. Gradients of all orders on streams of one core
must be the same, bit for bit. The simulator is told the costs of every action, measured in turn with the steps that it
predicts, those of one core a stream: an hour's or a minute's old costs are those of another machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.core import tables, timing
from sparsebp.core import threads as thread_pools
from sparsebp.core.errors import SparseBPError
from sparsebp.core.tables import Column
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.search import (
    FoundSchedule,
    OutOfOrderExecutor,
    TimedExecutor,
    all_schedules,
    alone_schedule,
    costs_alone,
    costs_beside,
    steady,
)
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import two_stream_list

TARGETS = {"speedup": 1.1, "error": 0.15}
"""Two streams over one for nets of many small layers; the simulator's relative error."""
SECONDS = 0.1
"""About what one timed run takes: steps are run in a row, as in training, and divided."""
CHECKED = 3
"""Steps whose gradients are compared."""

SIDES = {
    "conventional": "one stream, all cores, updates at the end", "fused": "one stream, all cores",
    "two": "two streams", "joint": "two streams, joint scheduling", "list": "two streams, list scheduling",
}  # fmt: skip
"""What `OutOfOrderExecutor` chooses from, in words."""
TWO = ("two", "joint", "list")
"""Those with two streams of one core each."""
SIMULATED = ("one", *TWO)
"""Those that the simulator predicts: costs are those of one core."""


def measure(run: Run) -> Iterator[Row]:
    """Measure the orders of a step of every network; `threads` are those of the stream that has all cores."""
    for count in run.threads():
        for network, (make, shape, small) in networks(run.quick).items():
            row: Row = {"network": network, "threads": count} | measure_row(make, shape, run.rounds)
            yield row | judge(row, small)


Network = tuple[Callable[[], Any], tuple[int, ...], bool]


def networks(quick: bool = False) -> dict[str, Network]:
    """Return what makes each network, the shape of a batch, and whether it is one of many small layers."""
    from sparsebp import models

    if quick:
        dense = lambda: models.densenet(depth=7, growth=2, blocks=2, rng=0)  # noqa: E731
        return {"MLP, 6 × 16": (lambda: narrow(6, 16), (8, 16), True), "DenseNet": (dense, (2, 3, 8, 8), True)}
    return {
        "MLP, 64 × 64": (lambda: narrow(64, 64), (128, 64), True),
        "MLP, 64 × 256": (lambda: narrow(64, 256), (128, 256), True),
        "LeNet-5": (lambda: models.lenet5(rng=0), (32, 1, 28, 28), False),
        "MobileNetV2-style": (lambda: models.mobilenetv2(width=0.5, rng=0), (8, 3, 32, 32), True),
        "VGG-11": (lambda: models.vgg11(rng=0), (8, 3, 32, 32), False),
        "DenseNet, L = 40, k = 12": (lambda: models.densenet(rng=0), (8, 3, 32, 32), True),
    }


def narrow(layers: int, width: int) -> Any:
    """Return a fully connected net of many small layers, as the SNN of the 2018 DualPipe paper, but narrow."""
    from sparsebp import nn

    rng = np.random.default_rng(0)
    links: list[nn.Layer] = []
    for _ in range(layers - 1):
        links += [nn.Linear(width, width, rng=rng), nn.ReLU()]
    return nn.Sequential(*links, nn.Linear(width, 10, rng=rng))


def measure_row(
    make: Callable[[], Any], shape: tuple[int, ...], rounds: Mapping[str, Any], *, samples: int | None = None
) -> Row:
    """Find a schedule, compare gradients, time all sides in turn; `samples` are the first axis unless said."""
    rng = np.random.default_rng(0)
    batch = rng.standard_normal(shape, np.float32), rng.integers(10, size=shape[0] if samples is None else samples)
    found = find(make, batch)
    graph = found.schedule.graph
    size: dict[str, Any] = {"stages": graph.stages, "unweighted": graph.unweighted}
    # An order above the memory ratio is none that is kept; its time is shown all the same.
    orders = all_schedules(size, found.costs) | {trial.name: trial.schedule for trial in found.trials}
    check_gradients(make, batch, orders)
    orders["one"] = orders["fused"]
    steps = int(np.clip(SECONDS / found.trials[0].seconds, 2, 20))
    calls = {name: timing.Call(_steps(make, batch, order, steps, name)) for name, order in orders.items()}
    timed = {
        "costs alone": _timed(make, alone_schedule(Stages(make()))),
        "costs beside": _timed(make, two_stream_list(**size, costs=found.costs)),
    }
    calls |= {name: timing.Call(_in_a_row(executor, batch, steps, True)) for name, executor in timed.items()}
    timings = {
        name: timing.Timing(tuple(seconds / steps for seconds in measured.seconds))
        for name, measured in timing.measure(calls, **rounds).items()
    }
    costs = costs_beside(timed["costs beside"], costs_alone(timed["costs alone"]))
    timings["kept"] = timings[found.fastest.name]
    row: Row = {
        "batch": len(batch[1]), "stages": graph.stages, "steps": steps, "keeps": found.fastest.name,
        "memory": found.memory, "memory_ratio": found.memory_ratio,
    }  # fmt: skip
    row |= {name: measured.to_dict() for name, measured in timings.items() if name not in timed}
    row |= {f"{name}_ratio": timing.ratio(timings["one"], timings[name]) for name in (*SIDES, "kept")}
    row["kept_conventional_ratio"] = timing.ratio(timings["conventional"], timings["kept"])
    for name in SIMULATED:
        simulated = steady(orders[name], costs, steps)
        row |= {f"{name}_simulated": simulated, f"{name}_error": simulated / timings[name].median - 1}
    return row


def find(make: Callable[[], Any], batch: tuple[Any, Any]) -> FoundSchedule:
    """Train a network until its out-of-order schedule is found."""
    from sparsebp import nn

    model = make()
    executor = OutOfOrderExecutor(model, nn.CrossEntropyLoss(), optimizer_of(model))
    while executor.found is None:
        executor.step([batch])
    executor.close()
    return executor.found


def check_gradients(make: Callable[[], Any], batch: tuple[Any, Any], orders: Mapping[str, Schedule]) -> None:
    """Refuse orders whose gradients are not the same, bit for bit.

    Raises
    ------
    SparseBPError
        They differ.
    """
    from sparsebp import nn

    wanted: list[dict[str, bytes]] = []
    for name, order in orders.items():
        model = make()
        recorder = Recorder(optimizer_of(model))
        executor = Executor(model, nn.CrossEntropyLoss(), recorder, order)
        with thread_pools.one_core():
            for _ in range(CHECKED):
                executor.step([batch])
            executor.flush()
        executor.close()
        wanted = wanted or recorder.steps
        if recorder.steps != wanted:
            raise SparseBPError("Gradients depend on the order of a step", expected="those of one stream, bit for bit",
                                got=f"others from {order.name!r} ({name})", remedy="Report it")  # fmt: skip


class Recorder:
    """An optimizer that keeps the bytes of the gradients of every step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps: list[dict[str, bytes]] = []

    def begin(self) -> Recorder.Update:
        """Open a step."""
        self.steps.append({})
        return Recorder.Update(self.optimizer.begin(), self.steps[-1])

    class Update:
        """An update that keeps what it applies."""

        def __init__(self, update: Any, kept: dict[str, bytes]) -> None:
            self.update, self.kept = update, kept

        @property
        def remaining(self) -> Any:
            """Return the names not yet applied."""
            return self.update.remaining

        def apply(self, grads: Mapping[str, np.ndarray]) -> None:
            """Keep and apply gradients."""
            self.kept |= {name: grad.tobytes() for name, grad in grads.items()}
            self.update.apply(grads)


def optimizer_of(model: Any) -> Any:
    """Return the optimizer of the timed steps."""
    from sparsebp import optim

    return optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _steps(
    make: Callable[[], Any], batch: tuple[Any, Any], order: Schedule, steps: int, name: str
) -> Callable[[object], None]:
    """Return a function that runs steps in a row."""
    from sparsebp import nn

    model = make()
    executor = Executor(model, nn.CrossEntropyLoss(), optimizer_of(model), order)
    return _in_a_row(executor, batch, steps, name not in ("conventional", "fused"))


def _timed(make: Callable[[], Any], order: Schedule) -> TimedExecutor:
    """Return who measures what every action costs in an order."""
    from sparsebp import nn

    model = make()
    return TimedExecutor(model, nn.CrossEntropyLoss(), optimizer_of(model), order)


def _in_a_row(executor: Executor, batch: tuple[Any, Any], steps: int, one_core: bool) -> Callable[[object], None]:
    def run_steps(_: object) -> None:
        with thread_pools.one_core() if one_core else contextlib.nullcontext():
            for _step in range(steps):
                executor.step([batch])
            executor.flush()

    return run_steps


def judge(row: Mapping[str, Any], small: bool) -> dict[str, str]:
    """Say whether the row reaches what it is to reach."""
    missed = [f"error of {name}" for name in SIMULATED if abs(row[f"{name}_error"]) > TARGETS["error"]]
    if small and max(row[f"{name}_ratio"]["median"] for name in TWO) < TARGETS["speedup"]:
        missed.insert(0, "speed-up")
    return {"met": report.outcome(missed)}


def picture(result: Result) -> Any:
    """Draw the speed-up over one stream on one core."""
    rows = result["rows"]
    colours = ("#d1d5db", "#9ca3af", "#bfdbfe", "#60a5fa", "#1e40af")
    bars = [(words, colour, [row[f"{side}_ratio"]["median"] for row in rows])
            for (side, words), colour in zip(SIDES.items(), colours, strict=True)]  # fmt: skip
    labels = [f"{row['network']}, batch {row['batch']}" for row in rows]
    drawing, ax = pictures.bar_chart(labels, bars, "times faster than one stream on one core", each=0.75)
    middles = {
        side: [bar.get_y() + bar.get_height() / 2 for bar in shown]
        for side, shown in zip(SIDES, ax.containers, strict=True)
    }
    for side in TWO:
        simulated = [row["one"]["median"] / row[f"{side}_simulated"] for row in rows]
        ax.plot(simulated, middles[side], "k|", markersize=6, label="simulated" if side == "list" else None)
    kept = [middles[row["keeps"]][i] for i, row in enumerate(rows)]
    ax.plot([0.03] * len(rows), kept, "k*", markersize=5, label='kept by schedule="ooo"')
    ax.axvline(1.0, color="#6b7280", linewidth=0.8, linestyle="--")
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return drawing


def _of_two(what: str) -> tuple[str, ...]:
    return tuple(f"{side}_{what}" for side in TWO)


BENCHMARK = Benchmark(
    name="schedule",
    title="A training step in several orders: float32, CPU",
    leaves_out="the steps in which the schedule is found; loading of batches",
    settings={"dtype": "float32", "optimizer": "SGD, momentum", "targets": TARGETS, "fusion": "backward"},
    rounds={"rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0},
    threads=(2,),
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("batch", "batch"),
        Column("stages", "stages", on_terminal=False),
        Column("one stream, one core", "one", tables.seconds),
        Column("one stream, all cores", "fused", tables.seconds),
        Column("conventional", "conventional", tables.seconds),
        Column("two streams", "two", tables.seconds),
        Column("two streams, joint", "joint", tables.seconds),
        Column("two streams, list", "list", tables.seconds),
        Column("kept", "keeps", number=False),
        Column("all cores over one", "fused_ratio", tables.times),
        *(Column(f"{side} over one", f"{side}_ratio", tables.times) for side in (*TWO, "kept")),
        Column("kept over conventional", "kept_conventional_ratio", tables.times),
        *(Column(f"error, {side}", f"{side}_error", "{:+.0%}".format) for side in SIMULATED),
        Column("memory", "memory", "{:.2f} ×".format),
        Column("threads", "threads", on_terminal=False),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time of a step": ("network", "batch", "one", "fused", "conventional", *TWO),
        "Over one stream on one core": ("network", "batch", "fused_ratio", *_of_two("ratio")),
        "What was kept": ("network", "batch", "keeps", "kept_ratio", "kept_conventional_ratio", "memory", "met"),
        "Simulated beside measured": ("network", "batch", "stages", "threads", "one_error", *_of_two("error")),
    },
    short=("network", "batch", "one", "conventional", "keeps", "kept_ratio", "kept_conventional_ratio", "met"),
    picture=picture,
)
