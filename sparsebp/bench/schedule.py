"""Whole steps on one stream and on two, in the conventional order and out of order; measured beside simulated.

``sparsebp bench schedule``. Every side runs forward, backward and updates of the same network. On one stream: on one
core; with kernels and BLAS that use all cores by themselves; the same with the updates at the end, which is what
``Trainer(schedule="conventional")`` runs. On two streams of one core each: weight gradients in the conventional order,
in that of joint scheduling (Oh et al., 2022, Algorithm 1), and in that of list scheduling. ``schedule="ooo"`` measures
them in its first steps and keeps one: the column "kept" says which, and its time is measured again with all others.
All but ``"conventional"`` update each parameter right after its gradient. Gradients of all orders on streams of one
core must be the same, bit for bit. The simulator is told the measured costs and predicts the orders of one core a
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.bench.tools import report, timing
from sparsebp.bench.tools.report import Column
from sparsebp.core import threads as thread_pools
from sparsebp.core.errors import SparseBPError
from sparsebp.runtime.candidates import FoundSchedule, all_schedules, steady
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.out_of_order import OutOfOrderExecutor
from sparsebp.schedule import Schedule

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

COLUMNS = (
    Column("network", "network", number=False),
    Column("batch", "batch"),
    Column("stages", "stages"),
    Column("one stream, one core", "one", report.seconds),
    Column("one stream, all cores", "fused", report.seconds),
    Column("conventional", "conventional", report.seconds),
    Column("two streams", "two", report.seconds),
    Column("two streams, joint", "joint", report.seconds),
    Column("two streams, list", "list", report.seconds),
    Column("kept", "keeps", number=False),
    Column("all cores over one", "fused_ratio", report.times),
    Column("two over one", "two_ratio", report.times),
    Column("joint over one", "joint_ratio", report.times),
    Column("list over one", "list_ratio", report.times),
    Column("kept over one", "kept_ratio", report.times),
    Column("kept over conventional", "kept_conventional_ratio", report.times),
    Column("error, one", "one_error", "{:+.0%}".format),
    Column("error, two", "two_error", "{:+.0%}".format),
    Column("error, joint", "joint_error", "{:+.0%}".format),
    Column("error, list", "list_error", "{:+.0%}".format),
    Column("memory", "memory", "{:.2f} ×".format),
    Column("threads", "threads"),
    Column("outcome", "met", number=False),
)
TABLES = {
    "Time of a step": ("network", "batch", "one", "fused", "conventional", "two", "joint", "list"),
    "Over one stream on one core": ("network", "batch", "fused_ratio", "two_ratio", "joint_ratio", "list_ratio"),
    "What was kept": ("network", "batch", "keeps", "kept_ratio", "kept_conventional_ratio", "memory", "met"),
    "Simulated beside measured": (
        "network", "batch", "stages", "threads", "one_error", "two_error", "joint_error", "list_error",
    ),
}  # fmt: skip
SHORT = ("network", "batch", "one", "conventional", "kept", "keeps", "kept_ratio", "kept_conventional_ratio", "met")
"""Columns of the README's table."""


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (2,),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``schedule.json`` and ``schedule.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`; `threads` are those of the stream that has all cores.

    Raises
    ------
    SparseBPError
        Gradients of two orders differ.
    """
    rounds: dict[str, Any] = {"rounds": 2, "least_rounds": 2, "warmup": 1} if quick else {
        "rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0
    }  # fmt: skip
    result = report.start(
        "schedule", "A training step in several orders: float32, CPU", quick=quick,
        settings={"threads": threads, "dtype": "float32", "optimizer": "SGD, momentum", "targets": TARGETS,
                  "fusion": "backward"},
        leaves_out="the steps in which the schedule is found; loading of batches",
    )  # fmt: skip
    for count in timing.thread_counts_here(threads, result["notes"].append):
        with timing.threads(count):
            for network, (make, shape, small) in networks(quick).items():
                row: dict[str, Any] = {"network": network, "threads": count} | measure_row(make, shape, rounds)
                result["rows"].append(row | judge(row, small))
                echo(f"{network}: keeps {row['keeps']}, {report.times(row['kept_ratio'])} over one stream on one core")
    report.finish(result, [c for c in COLUMNS if c.key not in ("threads", "stages")], picture, out, echo)
    return result


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


def measure_row(make: Callable[[], Any], shape: tuple[int, ...], rounds: Mapping[str, Any]) -> dict[str, Any]:
    """Find a schedule, compare gradients, time all sides in turn."""
    rng = np.random.default_rng(0)
    batch = rng.standard_normal(shape, np.float32), rng.integers(10, size=shape[0])
    found = find(make, batch)
    graph = found.schedule.graph
    size = {"stages": graph.stages, "unweighted": graph.unweighted}
    # An order above the memory ratio is none that is kept; its time is shown all the same.
    orders = all_schedules(size, found.costs) | {trial.name: trial.schedule for trial in found.trials}
    check_gradients(make, batch, orders)
    orders["one"] = orders["fused"]
    steps = int(np.clip(SECONDS / found.trials[0].seconds, 2, 20))
    calls = {name: timing.Call(_steps(make, batch, order, steps, name)) for name, order in orders.items()}
    timings = {
        name: timing.Timing(tuple(seconds / steps for seconds in measured.seconds))
        for name, measured in timing.measure(calls, **rounds).items()
    }
    timings["kept"] = timings[found.fastest.name]
    row: dict[str, Any] = {
        "batch": shape[0], "stages": graph.stages, "steps": steps, "keeps": found.fastest.name,
        "memory": found.memory, "memory_ratio": found.memory_ratio,
    }  # fmt: skip
    row |= {name: measured.to_dict() for name, measured in timings.items()}
    row |= {f"{name}_ratio": timing.ratio(timings["one"], timings[name]) for name in (*SIDES, "kept")}
    row["kept_conventional_ratio"] = timing.ratio(timings["conventional"], timings["kept"])
    for name in SIMULATED:
        simulated = steady(orders[name], found.costs, steps)
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

    def run_steps(_: object) -> None:
        with contextlib.nullcontext() if name in ("conventional", "fused") else thread_pools.one_core():
            for _step in range(steps):
                executor.step([batch])
            executor.flush()

    return run_steps


def judge(row: Mapping[str, Any], small: bool) -> dict[str, str]:
    """Say whether the row reaches what it is to reach."""
    missed = [f"error of {name}" for name in SIMULATED if abs(row[f"{name}_error"]) > TARGETS["error"]]
    if small and max(row[f"{name}_ratio"]["median"] for name in TWO) < TARGETS["speedup"]:
        missed.insert(0, "speed-up")
    return {"met": f"missed: {', '.join(missed)}" if missed else "met"}


def picture(result: Mapping[str, Any]) -> Any:
    """Draw the speed-up over one stream on one core."""
    rows = result["rows"]
    drawing, axes = report.figure(1, 1, width=8.0, height=0.75 * len(rows) + 1.4)
    ax = axes[0, 0]
    colors = ("#d1d5db", "#9ca3af", "#bfdbfe", "#60a5fa", "#1e40af")
    height = 0.16
    for place, (side, color) in enumerate(zip(SIDES, colors, strict=True)):
        at = [i + (place - 2) * height for i in range(len(rows))]
        ax.barh(at, [row[f"{side}_ratio"]["median"] for row in rows], height=height, color=color, label=SIDES[side])
        if side in SIMULATED:
            simulated = [row["one"]["median"] / row[f"{side}_simulated"] for row in rows]
            ax.plot(simulated, at, "k|", markersize=6, label="simulated" if side == "list" else None)
    kept = [i + (list(SIDES).index(row["keeps"]) - 2) * height for i, row in enumerate(rows)]
    ax.plot([0.03] * len(rows), kept, "k*", markersize=5, label='kept by schedule="ooo"')
    ax.axvline(1.0, color="#6b7280", linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(rows)), [f"{row['network']}, batch {row['batch']}" for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("times faster than one stream on one core", fontsize=9)
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return drawing
