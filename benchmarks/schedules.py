"""Whole steps on one stream and on two, in the conventional order and out of order; measured and simulated.

``python -m benchmarks schedule``. Every side runs forward, backward and updates of the same network. On one stream: on
one core; with kernels and BLAS that use all cores by themselves; the same with the updates at the end, which is what
``Trainer(schedule="conventional")`` runs. On two streams of one core each: weight gradients in the conventional order,
in that of joint scheduling (Oh et al., 2022, Algorithm 1), and in that of list scheduling. ``schedule="ooo"`` measures
them in its first steps and keeps one: the column "kept" says which, and its time is measured again with all others. All
but ``"conventional"`` update each parameter right after its gradient. Gradients of all orders on streams of one core
must be bitwise equal. The simulator gets the costs of every action, measured in turn with the steps that it predicts
(those with one core a stream): costs drift within minutes.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, workloads
from benchmarks.harness import Benchmark, Result, Row, Run, columns
from benchmarks.workloads import IMAGES, NETWORKS, STAGES, SequenceWorkload, mlp
from sparsebp import models, nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core import threads as thread_pools
from sparsebp.core import timing
from sparsebp.core.errors import NonFiniteError, SparseBPError
from sparsebp.core.tables import Column
from sparsebp.runtime.actions import Observer, Stages, Step
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.measure import TimedExecutor, concurrent_costs, isolated_costs, isolated_schedule
from sparsebp.runtime.pipeline import Distance, PipelineExecutor
from sparsebp.runtime.search import FoundSchedule, OutOfOrderExecutor, all_schedules, steady
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import dualpipe2018, pipedream, two_stream_list

# Two threads where other processes have the cores: a training step next to busy processes, with one thread and two.
#
# ``python -m benchmarks busy``. GRU(1, 16), T = 120, float32, and as many processes that never rest as the row says.
# The 90th percentile counts, not the median: a thread that waits for a core waits milliseconds.

FEATURES, HIDDEN, LENGTH = 1, 16, 120
ROUNDS = 4
TARGET = 1.3
"""Times the 90th percentile of one thread that the one of more may be."""


def measure_busy(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for batch in run.settings["batches"]:
            for busy in run.settings["processes"]:
                yield measure_busy_row(batch, busy, count, run.settings["steps"])


def measure_busy_row(batch: int, busy: int, threads: int, steps: int) -> Row:
    workload = SequenceWorkload("GRU", LENGTH, batch, input_size=FEATURES, hidden=HIDDEN)
    seconds: dict[int, list[float]] = {1: [], threads: []}
    with busy_processes(busy):
        for _ in range(ROUNDS):
            for count in seconds:
                with harness.using_threads(count):
                    seconds[count] += _busy_steps(workload, -(-steps // ROUNDS))
    row: Row = {"batch": batch, "processes": busy, "threads": threads, "target": TARGET}
    for name, count in (("one", 1), ("more", threads)):
        row |= {f"{name}_p{q}": float(np.percentile(seconds[count], q)) for q in (50, 90)}
        row[f"{name}_max"] = max(seconds[count])
    row |= {f"ratio_p{q}": row[f"more_p{q}"] / row[f"one_p{q}"] for q in (50, 90)}
    return row | {"met": "met" if row["ratio_p90"] <= TARGET else "missed"}


def _busy_steps(workload: SequenceWorkload, steps: int) -> list[float]:
    workload.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        workload.step()
        taken.append(time.perf_counter() - start)
    return taken


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let `count` processes compute all the time inside the ``with`` block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        if others:
            time.sleep(0.2)  # until they have started
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


BUSY = Benchmark(
    name="busy",
    title=f"A training step of GRU({FEATURES}, {HIDDEN}) while other processes compute: T = {LENGTH}, float32, CPU",
    leaves_out="nothing; a step is forward, cross-entropy, backward, Adam",
    settings={"target": TARGET},
    sizes={"steps": 200, "batches": (1, 25, 128), "processes": (0, 1, 2)},
    quick={"steps": 4, "batches": (2,), "processes": (0, 1)},
    threads=(2,),
    measure=measure_busy,
    columns=columns(
        numbers={"processes": "busy processes", "target": "target"},
        seconds={
            "one_p50": "one thread, p50", "one_p90": "one thread, p90", "more_p50": "more threads, p50",
            "more_p90": "more threads, p90",
        },
        times={"ratio_p50": "p50, more / one", "ratio_p90": "p90, more / one"},
    ),
    short=("batch", "processes", "threads", "one_p90", "more_p90", "ratio_p90", "met"),
    picture=harness.bars("B = {batch}, {processes} busy processes", {"one_p90": "1 thread", "more_p90": "more threads"},
                         "90th percentile of a step, ms; one thread or more", unit=1e3),
)  # fmt: skip


TARGETS = {"speedup": 1.1, "error": 0.15}
"""Two streams over one for nets of many small layers; the simulator's relative error."""
SECONDS = 0.1
"""Of one timed run, about: steps run in a row, as in training, and are averaged."""
CHECKED = 3
"""Steps whose gradients are compared."""

ORDERS = {
    "conventional": "one stream, all cores, updates at the end", "fused": "one stream, all cores",
    "two": "two streams", "joint": "two streams, joint scheduling", "list": "two streams, list scheduling",
}  # fmt: skip
"""The choices of `OutOfOrderExecutor`, in words."""
TWO = ("two", "joint", "list")
"""Those with two streams of one core each."""
SIMULATED = ("one", *TWO)
"""The orders that the simulator predicts, with costs of one core."""


def measure_schedule(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for network, (make, shape, small) in schedule_networks(run.quick).items():
            row: Row = {"network": network, "threads": count} | measure_schedule_row(make, shape, run.rounds)
            yield row | judge(row, small)


Network = tuple[Callable[[], Any], tuple[int, ...], bool]


def schedule_networks(quick: bool = False) -> dict[str, Network]:
    """Return each network's constructor, the shape of a batch, and whether its layers are many and small."""
    if quick:
        dense = lambda: models.densenet(depth=7, growth=2, blocks=2, rng=0)  # noqa: E731
        return {"MLP, 6 × 16": (lambda: mlp(16, 6, 10), (8, 16), True), "DenseNet": (dense, (2, 3, 8, 8), True)}
    return {
        "MLP, 64 × 64": (lambda: mlp(64, 64, 10), (128, 64), True),
        "MLP, 64 × 256": (lambda: mlp(256, 64, 10), (128, 256), True),
        "LeNet-5": (IMAGES["LeNet-5"][0], (32, 1, 28, 28), False),
        "MobileNetV2-style": (lambda: models.mobilenetv2(width=0.5, rng=0), (8, 3, 32, 32), True),
        "VGG-11": (IMAGES["VGG-11"][0], (8, 3, 32, 32), False),
        "DenseNet, L = 40, k = 12": (lambda: models.densenet(rng=0), (8, 3, 32, 32), True),
    }


def measure_schedule_row(
    make: Callable[[], Any], shape: tuple[int, ...], rounds: Mapping[str, Any], *, samples: int | None = None
) -> Row:
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
    calls = {
        name: timing.Call(_in_a_row(_executor(make, order), batch, steps, name not in ("conventional", "fused")))
        for name, order in orders.items()
    }
    timed = {
        "costs alone": _executor(make, isolated_schedule(Stages(make())), TimedExecutor),
        "costs beside": _executor(make, two_stream_list(**size, costs=found.costs), TimedExecutor),
    }
    calls |= {name: timing.Call(_in_a_row(executor, batch, steps, True)) for name, executor in timed.items()}
    timings = {name: harness.each(taken, steps) for name, taken in timing.measure(calls, **rounds).items()}
    costs = concurrent_costs(timed["costs beside"], isolated_costs(timed["costs alone"]))
    timings["kept"] = timings[found.fastest.name]
    row: Row = {
        "batch": len(batch[1]), "stages": graph.stages, "steps": steps, "keeps": found.fastest.name,
        "memory": found.memory, "memory_ratio": found.memory_ratio,
    }  # fmt: skip
    row |= {name: measured.to_dict() for name, measured in timings.items() if name not in timed}
    row |= {f"{name}_ratio": timing.ratio(timings["one"], timings[name]) for name in (*ORDERS, "kept")}
    row["kept_conventional_ratio"] = timing.ratio(timings["conventional"], timings["kept"])
    for name in SIMULATED:
        simulated = steady(orders[name], costs, steps)
        row |= {f"{name}_simulated": simulated, f"{name}_error": simulated / timings[name].median - 1}
    return row


def find(make: Callable[[], Any], batch: tuple[Any, Any]) -> FoundSchedule:
    """Train a network until its out-of-order schedule is found."""
    model = make()
    executor = OutOfOrderExecutor(model, nn.CrossEntropyLoss(), optimizer_of(model))
    while executor.found is None:
        executor.step([batch])
    executor.close()
    return executor.found


def check_gradients(make: Callable[[], Any], batch: tuple[Any, Any], orders: Mapping[str, Schedule]) -> None:
    """Refuse orders whose gradients are not bitwise equal."""
    wanted: list[dict[str, bytes]] = []
    for name, order in orders.items():
        model = make()
        recorder = Recorder(optimizer_of(model))
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), recorder, order)
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
        """An update that keeps the gradients that it applies."""

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
    return optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _executor(make: Callable[[], Any], order: Schedule, cls: type[PlainExecutor] = PlainExecutor) -> Any:
    model = make()
    return cls(model, nn.CrossEntropyLoss(), optimizer_of(model), order)


def _in_a_row(executor: PlainExecutor, batch: tuple[Any, Any], steps: int, one_core: bool) -> Callable[[object], None]:
    """Return a function that runs steps in a row."""

    def run_steps(_: object) -> None:
        with thread_pools.one_core() if one_core else contextlib.nullcontext():
            for _step in range(steps):
                executor.step([batch])
            executor.flush()

    return run_steps


def judge(row: Mapping[str, Any], small: bool) -> dict[str, str]:
    missed = [f"error of {name}" for name in SIMULATED if abs(row[f"{name}_error"]) > TARGETS["error"]]
    if small and max(row[f"{name}_ratio"]["median"] for name in TWO) < TARGETS["speedup"]:
        missed.insert(0, "speed-up")
    return {"met": harness.outcome(missed)}


SCHEDULE = Benchmark(
    name="schedule",
    title="A training step in several orders: float32, CPU",
    leaves_out="the steps in which the schedule is found; loading batches",
    settings={"dtype": "float32", "optimizer": "SGD, momentum", "targets": TARGETS, "fusion": "backward"},
    rounds={"rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0},
    threads=(2,),
    measure=measure_schedule,
    columns=columns(
        words={"keeps": "kept"},
        numbers={"batch": "batch", "stages": "stages"},
        seconds={
            "one": "one stream, one core", "fused": "one stream, all cores", "conventional": "conventional",
            "two": "two streams", "joint": "two streams, joint", "list": "two streams, list",
        },
        times={
            "fused_ratio": "all cores over one", **{f"{side}_ratio": f"{side} over one" for side in (*TWO, "kept")},
            "kept_conventional_ratio": "kept over conventional",
        },
        formats={
            "{:+.0%}": {**{f"{side}_error": f"error, {side}" for side in SIMULATED}}, "{:.2f} ×": {"memory": "memory"},
        },
    ),
    short=("network", "batch", "one", "conventional", "keeps", "kept_ratio", "kept_conventional_ratio", "met"),
    picture=harness.bars("{network}, batch {batch}", {f"{side}_ratio": words for side, words in ORDERS.items()},
                         "speed-up over one stream on one core, median", line=1.0),
)  # fmt: skip


# Asynchronous pipelines with stale, stashed and predicted weights: accuracy, losses, errors of the prediction.
#
# ``python -m benchmarks spectrain``. Networks in four stages on real digits (Chen et al., 2018, §4.4 and Fig. 9, on
# networks of a size for a CPU). All sides see the same batches from the same initial weights; only the weights that F
# and I read differ. The four ranks are threads of this process, and every action reads exactly the version that its
# schedule says.

MOMENTUM, POINTS = 0.9, 50
LEVELS = ("moderate", "high")


class Side(NamedTuple):
    """One way to train: a schedule, a predictor, and its colour in the picture."""

    schedule: str | None
    predictor: str | None
    colour: str


SIDES = {
    "synchronous": Side(None, None, "#111827"),
    "vanilla": Side("DualPipe (2018)", "none", "#ea580c"),
    "stashing": Side("PipeDream", None, "#a16207"),
    "SpecTrain": Side("DualPipe (2018)", "momentum", harness.OURS),
    "optimizer rule": Side("DualPipe (2018)", "optimizer_rule", "#0f766e"),
    "finite difference": Side("DualPipe (2018)", "finite_difference", "#a21caf"),
}
BUILDERS = {"DualPipe (2018)": dualpipe2018, "PipeDream": pipedream}


class Trained(NamedTuple):
    """One run: accuracy on the test set, the losses of all micro-batches, and the distances that were measured."""

    accuracy: float
    losses: list[float]
    distances: list[Distance]


class Losses(Observer):
    """Keeps the loss of every micro-batch; one that is not finite ends the run."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def loss(self, step: Step, m: int, value: float) -> None:
        """Note it."""
        self.found.append(value)
        if not math.isfinite(value):
            raise NonFiniteError("The loss is not finite", expected="a number", got=value, remedy="Lower the rate")


@cache
def schedule_of(name: str, batches: int) -> Schedule:
    """Return a schedule of four stages on four workers; every batch is a micro-batch of one endless step."""
    return BUILDERS[name](workers=STAGES, stages=STAGES, microbatches=batches)


def measure_spectrain(run: Run) -> Iterator[Row]:
    for name in run.settings["networks"]:
        sizes, steps, batch = run.settings["sizes"][name], run.settings["steps"][name], run.settings["batch"]
        data = NETWORKS[name].data(run.settings["test"])
        for level, rate in zip(LEVELS, NETWORKS[name].rates, strict=True):
            synchronous: list[Trained] = []
            for side in SIDES:
                begin = time.perf_counter()
                runs = [
                    train(name, sizes, data, side, rate, batch, steps, seed, measured=number == 0)
                    for number, seed in enumerate(run.settings["seeds"])
                ]
                synchronous = synchronous or runs
                row: Row = {"network": name, "level": level, "rate": rate, "side": side, "steps": steps}
                yield row | summary(runs, synchronous) | {"seconds": time.perf_counter() - begin}


def train(
    name: str,
    sizes: Mapping[str, Any],
    data: Any,
    side: str,
    rate: float,
    batch: int,
    steps: int,
    seed: int,
    *,
    measured: bool,
) -> Trained:
    """Train once; a loss that is not finite ends the run, which counts as guessing then.

    Distances take a copy of all weights that are read, so they are measured only if asked for.
    """
    train_set, test_set = data
    given = [train_set.batch(chosen) for chosen in workloads.batches(len(train_set), batch, seed, steps)]
    watch, distances = Losses(), []  # type: ignore[var-annotated]

    def work(transport: Transport | None) -> nn.Sequential:
        model = NETWORKS[name].build(np.random.default_rng(seed), **sizes)
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        with np.errstate(over="ignore", invalid="ignore"):
            if transport is None:
                for m, (x, target) in enumerate(given):
                    watch.loss(None, m, workloads.step(model, optimizer, x, target))  # type: ignore[arg-type]
            else:
                _train_on_ranks(
                    model, optimizer, SIDES[side], given, transport, watch, distances.append if measured else None
                )
        return model

    try:
        model = work(None) if SIDES[side].schedule is None else run_ranks(STAGES, work)[0]
    except NonFiniteError:
        return Trained(1 / len(set(test_set.labels.tolist())), watch.found, distances)
    x, target = test_set.batch(np.arange(len(test_set)))
    return Trained(float((model(x).argmax(axis=1) == target).mean()), watch.found, distances)


def _train_on_ranks(
    model: nn.Sequential, optimizer: optim.Optimizer, side: Side, given: Sequence[Any], transport: Transport,
    watch: Losses, note: Callable[[Distance], None] | None,
) -> None:  # fmt: skip
    predictor = None if side.predictor is None else optim.make_predictor(side.predictor, optimizer)
    executor = PipelineExecutor(
        model, nn.CrossEntropyLoss(), optimizer, schedule_of(side.schedule or "", len(given)), transport,
        observer=watch, predictor=predictor, note=note,
    )  # fmt: skip
    executor.step(given)
    executor.flush()


def summary(runs: Sequence[Trained], synchronous: Sequence[Trained]) -> Row:
    """Return the row of some runs, compared with the synchronous ones of the same seeds."""
    accuracies = np.array([run.accuracy for run in runs])
    mean, width = interval(accuracies)
    lost, lost_width = interval(accuracies - [run.accuracy for run in synchronous])
    steps = max(len(run.losses) for run in synchronous)
    curves = np.array([curve(run.losses, steps) for run in runs])
    finished = [run for run in runs if math.isfinite(run.losses[-1])]
    row: Row = {
        "accuracies": accuracies.tolist(), "accuracy": {"mean": mean, "interval": width},
        "difference": {"mean": lost, "interval": lost_width}, "diverged": len(runs) - len(finished),
        "verdict": "–" if runs is synchronous else verdict(lost, lost_width),
        "loss": [value if math.isfinite(value) else None for value in curves.mean(axis=0).tolist()],
    }  # fmt: skip
    errors = [distance for run in finished for distance in run.distances if distance.ahead > 0]
    for kind, what in (("F", "forward"), ("I", "backward")):
        chosen = [d for d in errors if d.action.kind == kind and d.action.microbatch >= 2 * STAGES]  # type: ignore[operator]
        if chosen:
            row[f"predicted_{what}"] = float(np.mean([d.predicted for d in chosen]))
            row[f"stale_{what}"] = float(np.mean([d.stale for d in chosen]))
            row[f"error_{what}"] = row[f"predicted_{what}"] / row[f"stale_{what}"] if row[f"stale_{what}"] else None
    return row


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % confidence interval by Student's t."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return float(values.mean()), 0.0
    return float(values.mean()), float(t.ppf(0.975, count - 1) * values.std(ddof=1) / math.sqrt(count))


def verdict(difference: float, width: float) -> str:
    """Say where a mean difference from synchronous training is."""
    if abs(difference) <= width:
        return "within noise"
    return "below" if difference < 0 else "above"


def curve(losses: Sequence[float], steps: int) -> list[float]:
    """Return the means of the losses over some segments of the steps; NaN after a run has ended."""
    whole = np.full(steps, np.nan)
    whole[: len(losses)] = losses
    return [float(part.mean()) for part in np.array_split(whole, min(POINTS, steps))]


def draw_spectrain(result: Result) -> Any:
    rows = result["rows"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    drawing, axes = harness.figure(len(networks), 3, width=8.5, height=2.4 * len(networks) + 0.5)
    for line, network in enumerate(networks):
        bars = axes[line, 2]
        for number, level in enumerate(LEVELS):
            ax = axes[line, number]
            of_level = [row for row in rows if (row["network"], row["level"]) == (network, level)]
            for row in of_level:
                values = [math.nan if value is None else value for value in row["loss"]]
                at = (np.arange(len(values)) + 0.5) * row["steps"] / len(values)
                ax.plot(at, values, color=SIDES[row["side"]].colour, linewidth=1.3, label=row["side"])
            if of_level:
                ax.set_title(f"{network}, rate {of_level[0]['rate']:g}", fontsize=9)
                ax.set_xlabel("training step, batches", fontsize=8)
                ax.set_ylim(0, 1.4 * max(value for value in of_level[0]["loss"] if value is not None))
            for place, row in enumerate(of_level):
                bars.bar(
                    number * (len(SIDES) + 1) + place, row["accuracy"]["mean"], color=SIDES[row["side"]].colour,
                    yerr=row["accuracy"]["interval"], capsize=2,
                )  # fmt: skip
        ticks = [f"{level} rate" for level in LEVELS]
        bars.set_xticks([len(SIDES) / 2 - 0.5 + number * (len(SIDES) + 1) for number in range(len(LEVELS))], ticks)
        bars.set_ylim(0, 1)
        bars.set_title(f"{network}, accuracy on the test set", fontsize=9)
        bars.set_ylabel("share classified right", fontsize=8)
        axes[line, 0].set_ylabel("training loss, nats")
    return drawing


def _with_interval(value: Mapping[str, float]) -> str:
    return f"{100 * value['mean']:.1f} ± {100 * value['interval']:.1f}"


_NETWORKS = tuple(NETWORKS)

SPECTRAIN = Benchmark(
    name="spectrain",
    title="Stale, stashed and predicted weights in four stages: SGD with momentum {momentum}, batch {batch}, digits",
    leaves_out="time: the ranks are threads of one process, and only the trained models are compared",
    settings={"momentum": MOMENTUM, "stages": STAGES},
    sizes={
        "networks": _NETWORKS, "test": 1000, "seeds": (0, 1, 2, 3, 4),
        "sizes": {name: dict(network.sizes) for name, network in NETWORKS.items()}, "batch": 32,
        "steps": {"SNN": 60, "VGG-11": 70, "GRU": 250, "Transformer": 150},
    },
    quick={
        "networks": ("SNN", "GRU"), "test": 10, "seeds": (0, 1),
        "sizes": {name: dict(network.quick) for name, network in NETWORKS.items()}, "batch": 8,
        "steps": dict.fromkeys(NETWORKS, 12),
    },
    threads=None,
    measure=measure_spectrain,
    columns=columns(
        Column("accuracy, %", "accuracy", _with_interval),
        Column("minus synchronous", "difference", _with_interval),
        words={"side": "weights", "verdict": "verdict"},
        numbers={"steps": "batches", "diverged": "diverged"},
        formats={
            "{:g}": {"rate": "rate"},
            "{:.2e}": {"predicted_forward": "RMSE in F, weights read", "stale_forward": "RMSE in F, newest weights"},
            "{:.2f}": {"error_forward": "RMSE in F, read / newest", "error_backward": "RMSE in I, read / newest"},
            "{:.0f}": {"seconds": "seconds"},
        },
    ),
    short=("network", "rate", "side", "accuracy", "difference", "verdict", "error_forward"),
    in_short=lambda row: row["level"] == LEVELS[0] and row["side"] in ("vanilla", "stashing", "SpecTrain"),
    picture=draw_spectrain,
)  # fmt: skip
